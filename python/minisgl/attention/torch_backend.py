"""Paged attention on a CPU, and in any dtype on a GPU.

Prompts (slices of several tokens) are computed in plain torch. The pages of each are gathered, and
each block of queries is multiplied with the keys that it may see. Decodes (slices of one token) are
computed together by `kernel/attention.py`.
"""

# Dimensions: B requests of a step, G query heads that share a kv head, H head width, K kv heads,
# L positions of a sequence, N query heads, P pages, Q positions of a page, R rows of the tables,
# T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, Batch, BatchPlan, IntArray
from minisgl.kernel import attend_decode, causal_softmax
from minisgl.kvcache import BaseKVCachePool

_QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A slice of several tokens, from position `start` of its request on.

    Attributes:
        first: the slice's first token in the batch.
        page_P: int64, the pages of its context.
    """

    first: int
    length: int
    start: int
    page_P: Tensor


@dataclass(frozen=True, slots=True)
class TorchAttnMetadata(BaseAttnMetadata):
    """The slices of a plan, sorted by how they are computed.

    Attributes:
        token_B, row_B, position_B: of each decode its token in the batch, its row of the page
            table, and its position; integers.
    """

    prompts: list[_Prompt]
    token_B: Tensor
    row_B: Tensor
    position_B: Tensor


class TorchAttentionBackend(BaseAttnBackend):
    """Over a pool of any layout."""

    supported = frozenset({"window", "softcap"})

    def __init__(
        self,
        kv_pool: BaseKVCachePool,
        page_table_RP: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        self._pool = kv_pool
        self._page_table_RP = page_table_RP
        self._page_size = kv_pool.page_size
        self._specs = specs
        layers = [kv_pool.kv_cache(layer).transpose(1, 2) for layer in range(kv_pool.num_layers)]
        self._paged_2KPQH: list[Tensor] = [kv.unflatten(2, (-1, self._page_size)) for kv in layers]
        _, num_kv_heads, _, self._head_dim = layers[0].shape
        self._heads = (num_kv_heads, num_heads // num_kv_heads)
        self.captures_graphs = page_table_RP.is_cpu

    def make_metadata(self, plan: BatchPlan) -> TorchAttnMetadata:
        prompts: list[_Prompt] = []
        decodes: list[tuple[int, int, int]] = []
        first = 0
        for req_slice in plan.slices:
            if len(req_slice) == 1:
                decodes.append((first, req_slice.row, req_slice.start))
            else:
                num_pages = -(-req_slice.end // self._page_size)
                page_P = self._page_table_RP[req_slice.row, :num_pages].long()
                prompts.append(_Prompt(first, len(req_slice), req_slice.start, page_P))
            first += len(req_slice)
        device = self._page_table_RP.device
        decodes_B3 = torch.tensor(decodes, dtype=torch.int64, device=device).view(-1, 3)
        return TorchAttnMetadata(prompts, *decodes_B3.T.contiguous())

    def make_capture_metadata(self, slices: CapturedSlices) -> TorchAttnMetadata:
        assert not slices.num_prompt_tokens, "only decodes are captured"
        return TorchAttnMetadata(
            prompts=[],
            token_B=torch.arange(slices.num_decodes),
            row_B=slices.row_X,
            position_B=torch.zeros(slices.num_decodes, dtype=torch.int32),
        )

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,  # noqa: ARG002 - of a decode, the one after start
    ) -> None:
        assert isinstance(metadata, TorchAttnMetadata)
        metadata.position_B.numpy()[:] = start_X

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,  # noqa: ARG002 - read from the pool
        v_TKH: Tensor,  # noqa: ARG002
        layer: int,
        batch: Batch,
    ) -> Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchAttnMetadata)
        spec = self._specs[layer]
        o_TNH = torch.empty_like(q_TNH)
        for prompt in metadata.prompts:
            tokens = slice(prompt.first, prompt.first + prompt.length)
            self._attend_prompt(q_TNH[tokens], layer, prompt, o_TNH[tokens])
        if len(metadata.token_B):
            attend_decode(
                q_TNH,
                self._pool.k_cache(layer),
                self._pool.v_cache(layer),
                self._page_table_RP,
                self._page_size,
                metadata.token_B,
                metadata.row_B,
                metadata.position_B,
                o_TNH,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
        return o_TNH

    def _attend_prompt(self, q_TNH: Tensor, layer: int, prompt: _Prompt, o_TNH: Tensor) -> None:
        """Attend by blocks of queries, into o_TNH. Positions count from the first gathered page."""
        window = self._specs[layer].window
        num_hidden_pages = _first_seen(prompt.start, window) // self._page_size
        page_P = prompt.page_P[num_hidden_pages:]
        start = prompt.start - num_hidden_pages * self._page_size
        k_KLH, v_KLH = self._paged_2KPQH[layer].index_select(2, page_P).flatten(2, 3)
        q_KGTH = q_TNH.unflatten(1, self._heads).permute(1, 2, 0, 3)
        o_KGTH = o_TNH.unflatten(1, self._heads).permute(1, 2, 0, 3)
        for begin in range(0, prompt.length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, prompt.length)
            length = end - begin
            seen = slice(_first_seen(start + begin, window), start + end)
            q_KXH = q_KGTH[:, :, begin:end].reshape(self._heads[0], -1, self._head_dim)
            weight_KXL = torch.bmm(q_KXH, k_KLH[:, seen].transpose(1, 2))
            self._softmax(weight_KXL, length, self._specs[layer])
            o_KXH = torch.bmm(weight_KXL, v_KLH[:, seen])
            o_KGTH[:, :, begin:end] = o_KXH.unflatten(1, (-1, length))

    def _softmax(self, score_KXL: Tensor, length: int, spec: AttentionSpec) -> None:
        """Weights of a block of queries, in place; the last key is that of the last query."""
        scale = spec.scale
        if spec.softcap is not None:
            score_KXL.mul_(scale / spec.softcap).tanh_()
            scale = spec.softcap
        causal_softmax(score_KXL, score_KXL.shape[2] - length, length, scale, spec.window)


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query sees."""
    return 0 if window is None else max(0, position + 1 - window)
