"""Paged attention in plain torch, prompts at least: what runs on a CPU, and in any dtype on a GPU.

A slice of several tokens (a prompt) gathers its pages and is computed in blocks of queries, each against just the keys
that it may see. Slices of one token (decodes) go to `kernel/decode.py` together.
"""

# Dimension key: T tokens in the batch, B decodes among them, N query heads, K kv heads, G query heads a kv head,
# H head dim, R table rows, P pages, s page size, L positions of a context.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend
from minisgl.core import BaseAttnMetadata, Batch, BatchPlan
from minisgl.kernel import attend_decode, causal_softmax
from minisgl.kvcache import BaseKVCachePool

_QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A slice of several tokens: rows [first, first + length) of the batch, from position `start`."""

    first: int
    length: int
    start: int
    page_P: Tensor


@dataclass(frozen=True, slots=True)
class TorchAttnMetadata(BaseAttnMetadata):
    """The slices of a plan, sorted by how they are computed.

    Attributes:
        token_B, row_B, position_B: int64; of the decodes, their row in the batch and in the page table, and where
            they stand.
    """

    prompts: list[_Prompt]
    token_B: Tensor
    row_B: Tensor
    position_B: Tensor


class TorchAttentionBackend(BaseAttnBackend):
    """Plain torch over any pool. Slots that were never written must be finite."""

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int) -> None:
        self._pool = kv_pool
        self._page_table_RP = page_table_RP
        self._page_size = kv_pool.page_size
        layers = [kv_pool.kv_cache(layer).transpose(1, 2) for layer in range(kv_pool.num_layers)]
        self._paged_2KPsH: list[Tensor] = [kv.unflatten(2, (-1, self._page_size)) for kv in layers]
        _, num_kv_heads, _, self._head_dim = layers[0].shape
        self._heads = (num_kv_heads, num_heads // num_kv_heads)
        self._scale = 1.0 / math.sqrt(self._head_dim)

    def prepare(self, plan: BatchPlan) -> TorchAttnMetadata:
        prompts: list[_Prompt] = []
        decodes: list[tuple[int, int, int]] = []
        first = 0
        for part in plan.slices:
            if len(part) == 1:
                decodes.append((first, part.row, part.start))
            else:
                page_P = self._page_table_RP[part.row, : -(-part.end // self._page_size)].long()
                prompts.append(_Prompt(first, len(part), part.start, page_P))
            first += len(part)
        decodes_3B = (
            torch.tensor(decodes, dtype=torch.int64, device=self._page_table_RP.device)
            .view(-1, 3)
            .T
        )
        return TorchAttnMetadata(prompts, *decodes_3B.contiguous())

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
        o_TNH = q_TNH.new_empty(q_TNH.shape)
        for prompt in metadata.prompts:
            rows = slice(prompt.first, prompt.first + prompt.length)
            self._attend_prompt(q_TNH[rows], layer, prompt, o_TNH[rows])
        if len(metadata.token_B):
            decodes = (metadata.token_B, metadata.row_B, metadata.position_B)
            pool = (self._pool.k_cache(layer), self._pool.v_cache(layer))
            attend_decode(q_TNH, *pool, self._page_table_RP, self._page_size, *decodes, o_TNH)
        return o_TNH

    def _attend_prompt(self, q_TNH: Tensor, layer: int, prompt: _Prompt, o_TNH: Tensor) -> None:
        """Blocks of queries, written to o_TNH."""
        k_KLH, v_KLH = self._paged_2KPsH[layer].index_select(2, prompt.page_P).flatten(2, 3)
        q_KGTH = q_TNH.unflatten(1, self._heads).permute(1, 2, 0, 3)
        o_KGTH = o_TNH.unflatten(1, self._heads).permute(1, 2, 0, 3)
        for begin in range(0, prompt.length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, prompt.length)
            length, seen = end - begin, prompt.start + end
            q = q_KGTH[:, :, begin:end].reshape(self._heads[0], -1, self._head_dim)
            weights = torch.bmm(q, k_KLH[:, :seen].transpose(1, 2))
            causal_softmax(weights, seen - length, length, self._scale)
            o_KGTH[:, :, begin:end] = torch.bmm(weights, v_KLH[:, :seen]).unflatten(1, (-1, length))
