"""Paged attention on a GPU by kernels of this project in Triton: any dtype, heads of any width.

It needs no compiler but Triton's own. In each layer the prompts of a step are a call of
`kernel/gpu/prompt_attention.py`, and its decodes are one of `kernel/gpu/attention.py`. Both find
rows, positions and lengths on the device, so a graph needs nothing from the host.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
# tables, T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, Queries
from minisgl.kernel import attend_decode, attend_prompts_on_device
from minisgl.kvcache import MHAKVCache
from minisgl.utils.staging import Staging, capacity_for


@dataclass(frozen=True, slots=True)
class TritonMetadata(BaseAttnMetadata):
    """Which tokens are decodes, and where the prompts after them begin.

    Attributes:
        num_decodes: at the head of the step.
        num_prompt_tokens: at most.
        prompt_indptr: int32, on the device: where each prompt begins, and the last one's end; None
            without prompts.
        captured: of a graph, some of whose decodes may be missing.
    """

    num_decodes: int
    num_prompt_tokens: int = 0
    prompt_indptr: Tensor | None = None
    captured: CapturedSlices | None = None

    def places(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """The row and the position of each decode; -1 is the position of a missing one."""
        if self.captured is not None:
            return self.captured.decodes.row_X, self.captured.decode_position_B
        decodes = slice(self.num_decodes)
        return queries.row_X[decodes], queries.position_X[decodes]


class TritonAttentionBackend(BaseAttnBackend):
    """Attends over a pool of any layout."""

    supported = frozenset({"window", "softcap"})
    can_be_captured = True

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
        num_rows = len(page_table_RP)
        self._staging = Staging(page_table_RP.device, capacity_for(num_rows + 1))
        self._query_B = torch.arange(num_rows, dtype=torch.int32, device=page_table_RP.device)

    def make_metadata(self, plan: BatchPlan) -> TritonMetadata:
        num_decodes = plan.num_decodes
        prompts = plan.slices[num_decodes:]
        if not prompts:
            return TritonMetadata(num_decodes)
        indptr = np.full(len(prompts) + 1, num_decodes, dtype=np.int32)
        indptr[1:] += np.cumsum([len(prompt) for prompt in prompts], dtype=np.int32)
        (sent,) = self._staging.send(indptr)
        # Copied once more: that of the next step goes to the same place.
        return TritonMetadata(num_decodes, int(indptr[-1]) - num_decodes, sent.clone())

    def make_capture_metadata(self, slices: CapturedSlices) -> TritonMetadata:
        return TritonMetadata(
            slices.num_decodes, slices.most_prompt_tokens, slices.prompt_indptr, slices
        )

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        """Nothing to do: the device finds all that it needs."""

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,  # noqa: ARG002 - read from the pool
        v_TKH: Tensor,  # noqa: ARG002
        layer: int,
        queries: Queries,
    ) -> Tensor:
        metadata = queries.attn_metadata
        assert isinstance(metadata, TritonMetadata)
        spec = self._specs[layer]
        o_TNH = torch.empty_like(q_TNH)
        pool_and_table = (
            self._pool.k_cache(layer),
            self._pool.v_cache(layer),
            self._page_table_RP,
        )
        if metadata.prompt_indptr is not None:
            attend_prompts_on_device(
                q_TNH,
                *pool_and_table,
                queries.row_X,
                queries.position_X,
                metadata.prompt_indptr,
                o_TNH,
                num_tokens=metadata.num_prompt_tokens,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
        if metadata.num_decodes:
            attend_decode(
                q_TNH,
                *pool_and_table,
                self._query_B[: metadata.num_decodes],
                *metadata.places(queries),
                o_TNH,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
        return o_TNH
