"""Metadata of backends whose kernels take lengths and a page table on the device.

Such a kernel needs no plan from the host: what it reads in a captured graph is computed on the
device from the positions of the tokens.
"""

# Dimensions: B requests of a step, P pages, R rows of the tables, X a selection out of another
# dimension.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, Queries
from minisgl.kvcache import MHAKVCache
from minisgl.utils.staging import Staging, capacity_for


@dataclass(slots=True)
class PagedMetadata(BaseAttnMetadata):
    """Where the queries and the keys of each slice are.

    Attributes:
        is_fresh: whether each slice begins with its request, so that its keys are just those of
            the batch.
        max_queries, max_keys: bounds, for each slice.
        captured: the slices of a graph. The tensors below are then made from it in
            `prepare_on_device`.
        query_indptr: int32 [B + 1], where the slices' tokens begin in the batch.
        length_B: int32, how many keys a slice has, those in the cache included.
        page_table_BP: int32; what follows a slice's own pages may be anything.
    """

    is_fresh: bool
    max_queries: int
    max_keys: int
    captured: CapturedSlices | None = None
    query_indptr: Tensor | None = None
    length_B: Tensor | None = None
    page_table_BP: Tensor | None = None


class PagedAttnBackend(BaseAttnBackend):
    """Makes the metadata of a step; a subclass attends."""

    can_be_captured = True

    def __init__(
        self,
        kv_pool: MHAKVCache,
        page_table_RP: Tensor,
        num_heads: int,  # noqa: ARG002 - kernels see it from the queries
        specs: Sequence[AttentionSpec],
    ) -> None:
        self._page_table_RP = page_table_RP
        self._page_size = kv_pool.page_size
        self._specs = specs
        num_rows = len(page_table_RP)
        capacity = capacity_for(num_rows, num_rows, num_rows + 1)
        self._staging = Staging(page_table_RP.device, capacity)
        self._pages = [
            (kv_pool.k_cache(layer), kv_pool.v_cache(layer)) for layer in range(kv_pool.num_layers)
        ]

    def make_metadata(self, plan: BatchPlan) -> PagedMetadata:
        row_B = np.array([req_slice.row for req_slice in plan.slices], dtype=np.int32)
        length_B = np.array([req_slice.end for req_slice in plan.slices], dtype=np.int32)
        indptr = np.zeros(len(row_B) + 1, dtype=np.int32)
        np.cumsum([len(req_slice) for req_slice in plan.slices], out=indptr[1:])
        metadata = PagedMetadata(
            is_fresh=all(req_slice.start == 0 for req_slice in plan.slices),
            max_queries=max(map(len, plan.slices)),
            max_keys=int(length_B.max()),
        )
        # Copied once more: other metadata of the step are sent to the same place.
        rows, lengths, query_indptr = self._staging.send(row_B, length_B, indptr)
        metadata.length_B = lengths.clone()
        metadata.query_indptr = query_indptr.clone()
        pages_RP = self._page_table_RP[:, : -(-metadata.max_keys // self._page_size)]
        metadata.page_table_BP = pages_RP.index_select(0, rows)
        return metadata

    def make_capture_metadata(self, slices: CapturedSlices) -> PagedMetadata:
        return PagedMetadata(
            is_fresh=False,
            max_queries=max(1, slices.most_prompt_tokens),
            max_keys=self._page_table_RP.shape[1] * self._page_size,
            captured=slices,
        )

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        """Nothing to do: the device finds lengths and pages itself."""

    def prepare_on_device(self, queries: Queries) -> None:
        metadata = queries.attn_metadata
        assert isinstance(metadata, PagedMetadata)
        slices = metadata.captured
        if slices is None:
            return
        indptr = torch.arange(slices.num_decodes + 1, dtype=torch.int32, device=slices.row_X.device)
        last_B = slices.decode_position_B
        if slices.prompt_indptr is not None:
            num_present = slices.prompt_indptr[0]
            indptr = torch.cat((indptr[:-1].clamp(max=num_present), slices.prompt_indptr))
            last_of_prompt_B = queries.position_X[slices.prompt_indptr[1:] - 1]
            last_B = torch.cat((last_B, last_of_prompt_B))
        # A missing decode has a query only where there are no prompts, and then a key, too.
        metadata.length_B = (last_B + 1).clamp(min=1) * (indptr.diff() > 0)
        metadata.query_indptr = indptr
        metadata.page_table_BP = self._page_table_RP.index_select(0, slices.row_X)
