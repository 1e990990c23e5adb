"""Paged attention on a CPU, and in any dtype on a GPU.

In each layer, the decodes at the head of a step (`BatchPlan.num_decodes`) are one call of
`kernel/attention.py`. Its prompts, which are all other slices, are another.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
# tables, T tokens of a step, X a selection out of another dimension; 4 is numbers of a prompt.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, Queries
from minisgl.kernel import attend_decode, attend_prompts
from minisgl.kvcache import MHAKVCache


@dataclass(frozen=True, slots=True)
class TorchAttnMetadata(BaseAttnMetadata):
    """The slices of a plan: its prompts, and its decodes.

    Attributes:
        prompt_query_X, prompt_row_X, prompt_start_X, prompt_length_X: of each prompt, as
            `attend_prompts` takes them.
        query_B, row_B, position_B: of each decode, as `attend_decode` takes them.
    """

    prompt_query_X: Tensor
    prompt_row_X: Tensor
    prompt_start_X: Tensor
    prompt_length_X: Tensor
    query_B: Tensor
    row_B: Tensor
    position_B: Tensor


class TorchAttentionBackend(BaseAttnBackend):
    """Attends over a pool of any layout."""

    supported = frozenset({"window", "softcap"})

    def __init__(
        self,
        kv_pool: MHAKVCache,
        page_table_RP: Tensor,
        num_heads: int,  # noqa: ARG002 - queries come with their shape
        specs: Sequence[AttentionSpec],
    ) -> None:
        self._pool = kv_pool
        self._page_table_RP = page_table_RP
        self._specs = specs
        self.can_be_captured = page_table_RP.is_cpu

    def make_metadata(self, plan: BatchPlan) -> TorchAttnMetadata:
        num_decodes = plan.num_decodes
        decodes = [
            (token, req_slice.row, req_slice.start)
            for token, req_slice in enumerate(plan.slices[:num_decodes])
        ]
        prompts: list[tuple[int, int, int, int]] = []
        first = num_decodes
        for req_slice in plan.slices[num_decodes:]:
            prompts.append((first, req_slice.row, req_slice.start, len(req_slice)))
            first += len(req_slice)
        prompt_X4 = torch.tensor(prompts, dtype=torch.int32).view(-1, 4)
        device = self._page_table_RP.device
        decodes_B3 = torch.tensor(decodes, dtype=torch.int32, device=device).view(-1, 3)
        return TorchAttnMetadata(*prompt_X4.T.contiguous(), *decodes_B3.T.contiguous())

    def make_capture_metadata(self, slices: CapturedSlices) -> TorchAttnMetadata:
        prompt_row_X = slices.prompts.row_X
        num_prompts = len(prompt_row_X)
        return TorchAttnMetadata(
            prompt_query_X=torch.zeros(num_prompts, dtype=torch.int32),
            prompt_row_X=prompt_row_X,
            prompt_start_X=torch.zeros(num_prompts, dtype=torch.int32),
            prompt_length_X=torch.zeros(num_prompts, dtype=torch.int32),
            query_B=torch.arange(slices.num_decodes, dtype=torch.int32),
            row_B=slices.decodes.row_X,
            position_B=slices.decode_position_B,
        )

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        """The last slice of a step with prompts is padding: nothing is computed for it."""
        assert isinstance(metadata, TorchAttnMetadata)
        num_decodes = len(metadata.query_B)
        if num_decodes == len(end_X):
            return
        metadata.prompt_start_X.numpy()[:] = start_X[num_decodes:]
        length_X = metadata.prompt_length_X.numpy()
        length_X[:] = end_X[num_decodes:] - start_X[num_decodes:]
        length_X[-1] = 0

        query_X = metadata.prompt_query_X.numpy()
        query_X[0] = first_token + np.count_nonzero(end_X[:num_decodes])
        np.cumsum(length_X[:-1], out=query_X[1:])
        query_X[1:] += query_X[0]

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,  # noqa: ARG002 - read from the pool
        v_TKH: Tensor,  # noqa: ARG002
        layer: int,
        queries: Queries,
    ) -> Tensor:
        metadata = queries.attn_metadata
        assert isinstance(metadata, TorchAttnMetadata)
        spec = self._specs[layer]
        o_TNH = torch.empty_like(q_TNH)
        pool_and_table = (
            self._pool.k_cache(layer),
            self._pool.v_cache(layer),
            self._page_table_RP,
        )
        if len(metadata.prompt_query_X):
            attend_prompts(
                q_TNH,
                *pool_and_table,
                metadata.prompt_query_X,
                metadata.prompt_row_X,
                metadata.prompt_start_X,
                metadata.prompt_length_X,
                o_TNH,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
        if len(metadata.query_B):
            attend_decode(
                q_TNH,
                *pool_and_table,
                metadata.query_B,
                metadata.row_B,
                metadata.position_B,
                o_TNH,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
        return o_TNH
