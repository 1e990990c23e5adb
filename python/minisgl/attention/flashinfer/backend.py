"""FlashInfer (Ye et al. 2025, arXiv:2501.01005): paged attention on NVIDIA GPUs.

How the work of its kernels is split over the device is planned on the host. A plan needs lengths
alone, so it can be made before the tokens of the step before are known. The lists of pages are made
on the device from the page table. A plan holds for layers of one `AttentionSpec`; a model with
several kinds of layers has as many plans per step.

Its kernels of prompts are FlashAttention 3 on Hopper and 2 elsewhere. Decodes mostly have kernels
of our own. Where these and our build of FlashInfer's kernels suffice, FlashInfer's Python is not
imported. Next to read: `step.py`, `decodes.py`, `prompts.py`.
"""

# Dimensions: H head width, K kv heads, N query heads, P pages, R rows of the tables, T tokens of a
# step, X a selection out of another dimension.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.attention.flashinfer.pool import FlashInferPool
from minisgl.attention.flashinfer.step import StepAttention, StepMetadata
from minisgl.builds import PROMPT_HEAD_DIMS
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, Queries
from minisgl.kvcache import MHAKVCache


@dataclass(frozen=True, slots=True)
class FlashInferMetadata(BaseAttnMetadata):
    """The metadata of a step for each distinct spec, in the order of the backend's."""

    of_specs: list[StepMetadata]


class FlashInferBackend(BaseAttnBackend):
    """Attends over a pool whose tokens have their heads side by side."""

    supported = frozenset({"window", "softcap"})
    head_dims = PROMPT_HEAD_DIMS
    can_be_captured = True

    def __init__(
        self,
        kv_pool: MHAKVCache,
        page_table_RP: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        pool = FlashInferPool(kv_pool, page_table_RP, num_heads)
        seen = [replace(spec, rope=None) for spec in specs]  # as far as attention sees it
        distinct = list(dict.fromkeys(seen))
        self._attentions = [StepAttention(pool, spec) for spec in distinct]
        self._index_of_layer = [distinct.index(spec) for spec in seen]

    def make_metadata(self, plan: BatchPlan) -> FlashInferMetadata:
        return FlashInferMetadata([attention.make_metadata(plan) for attention in self._attentions])

    def make_capture_metadata(self, slices: CapturedSlices) -> FlashInferMetadata:
        of_specs = [attention.make_capture_metadata(slices) for attention in self._attentions]
        metadata = FlashInferMetadata(of_specs)
        start_X = np.zeros(len(slices.row_X), dtype=np.int32)
        end_X = np.zeros(len(slices.row_X), dtype=np.int32)
        if slices.prompt_indptr is None:
            end_X[:] = 1
        else:
            end_X[-1] = slices.most_prompt_tokens
        self.update_metadata(metadata, start_X, end_X)
        return metadata

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        assert isinstance(metadata, FlashInferMetadata)
        for attention, of_spec in zip(self._attentions, metadata.of_specs, strict=True):
            attention.update_metadata(of_spec, start_X, end_X, first_token)

    def prepare_on_device(self, queries: Queries) -> None:
        assert isinstance(queries.attn_metadata, FlashInferMetadata)
        for attention, of_spec in zip(
            self._attentions, queries.attn_metadata.of_specs, strict=True
        ):
            attention.prepare_on_device(queries, of_spec)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, queries: Queries
    ) -> Tensor:
        assert isinstance(queries.attn_metadata, FlashInferMetadata)
        index = self._index_of_layer[layer]
        of_spec = queries.attn_metadata.of_specs[index]
        return self._attentions[index].forward(q_TNH, k_TKH, v_TKH, layer, queries, of_spec)
