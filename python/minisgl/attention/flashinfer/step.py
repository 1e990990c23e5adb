"""Attention of a step, in the layers of one spec: which of its slices each kernel takes, and when.

    decodes.py  our own kernels of decodes, or FlashInfer's
    prompts.py  FlashInfer's kernels of prompts, in its compilation or in ours

The decodes at the head of a step go to our own kernels, except in some graphs of decodes alone. All
other slices are prompts; where all begin at their first token, they need no pages. Decodes and
prompts of a step run side by side: the last wave of tiles of prompts leaves processors idle, which
decodes use.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
# tables, T tokens of a step, X a selection out of another dimension, Z entries of a flat list.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import CapturedSlices, group_arrays
from minisgl.attention.flashinfer.decodes import FlashInferDecodes, OwnDecodeKernels, OwnDecodes
from minisgl.attention.flashinfer.modules import import_flashinfer, load_hopper_module
from minisgl.attention.flashinfer.pool import FlashInferPool
from minisgl.attention.flashinfer.prompts import (
    FlashInferPaged,
    FlashInferRagged,
    GraphRoom,
    HopperPaged,
    HopperRagged,
    PagedPrompts,
    RaggedPrompts,
    flashinfer_prompt_bytes,
)
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BatchPlan, IntArray, Queries, ReqSlice
from minisgl.kernel import GroupTensors, triton_kernels_for


class _PageLists(NamedTuple):
    """Where slices have their pages.

    Attributes:
        row_B: int32, on the device.
        indptr: int32 [B + 1], the offsets of the slices' lists.
        page_Z: int32, room for the lists, one after the other.
    """

    row_B: Tensor
    indptr: Tensor
    page_Z: Tensor


@dataclass(slots=True)
class _SubBatch:
    """Slices that are computed together.

    Attributes:
        tokens: theirs, in the batch; all tokens for prompts in a captured graph, which begin where
            the decodes of a replay end.
        slices: of those of a captured graph.
        page_lists: None where their keys are just those of the batch.
    """

    attention: FlashInferDecodes | RaggedPrompts | PagedPrompts
    tokens: slice
    slices: slice = field(default_factory=lambda: slice(None))
    page_lists: _PageLists | None = None

    @property
    def writes_decodes(self) -> bool:
        """Whether anything is written for the decodes before these."""
        if not isinstance(self.attention, FlashInferPaged):
            return False
        return self.attention.room is not None


@dataclass(slots=True)
class StepMetadata:
    """The kernels and plans of one step, in the layers of one spec.

    Attributes:
        own_decodes: decodes at the head of the batch that our own kernels take; None if there are
            none, or a sub-batch has them.
    """

    sub_batches: list[_SubBatch] = field(default_factory=list)
    own_decodes: OwnDecodes | None = None


class StepAttention:
    """Attention of steps, in the layers of one spec."""

    def __init__(self, pool: FlashInferPool, spec: AttentionSpec) -> None:
        self._pool = pool
        self._own_kernels = OwnDecodeKernels(pool, spec)
        self._module = load_hopper_module(pool.device, pool.dtype, pool.shape[2], spec)
        self._shape = pool.layer_shape(spec)
        self._paged = self._paged_prompts(None)
        self._ragged: RaggedPrompts
        if self._module is None:
            workspace = pool.workspace_of(flashinfer_prompt_bytes(self._shape))
            self._ragged = FlashInferRagged(
                import_flashinfer(), pool.prefill_kernels, workspace, self._shape
            )
        else:
            self._ragged = HopperRagged(self._module, self._shape)
        self._graph_prompts: dict[int, PagedPrompts] = {}  # by the number of slices

    def _paged_prompts(self, room: GraphRoom | None) -> PagedPrompts:
        if self._module is not None:
            return HopperPaged(self._module, self._shape, self._pool.prompt_parts, room)
        pool = self._pool
        workspace = pool.workspace_of(flashinfer_prompt_bytes(self._shape, room))
        return FlashInferPaged(
            import_flashinfer(), pool.prefill_kernels, workspace, self._shape, room
        )

    def make_metadata(self, plan: BatchPlan) -> StepMetadata:
        num_decodes = plan.num_decodes
        prompts = plan.slices[num_decodes:]
        metadata = StepMetadata()
        if num_decodes:
            metadata.own_decodes = self._own_kernels.take(num_decodes, self._prefix_groups(plan))
        if prompts:
            tokens = slice(num_decodes, None)
            metadata.sub_batches.append(self._prompts(tokens, prompts))
        return metadata

    def _prompts(self, tokens: slice, prompts: list[ReqSlice]) -> _SubBatch:
        length_B = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        if any(prompt.start for prompt in prompts):
            paged = self._paged
            paged.plan(length_B, _ends(prompts))
            page_lists = _PageLists(self._rows(prompts), paged.indptr, paged.page_Z)
            return _SubBatch(paged, tokens, page_lists=page_lists)
        self._ragged.plan(length_B)
        return _SubBatch(self._ragged, tokens)

    def _rows(self, slices: list[ReqSlice]) -> Tensor:
        rows = [req_slice.row for req_slice in slices]
        return self._sent(torch.tensor(rows, dtype=torch.int32))

    def _prefix_groups(self, plan: BatchPlan) -> GroupTensors | None:
        if not plan.prefix_groups:
            return None
        arrays = group_arrays(plan.prefix_groups, plan.num_decodes, len(plan.prefix_groups))
        return GroupTensors(*[self._sent(torch.from_numpy(array)) for array in arrays])

    def _sent(self, numbers: Tensor) -> Tensor:
        """A copy on the device, made without waiting."""
        return numbers.pin_memory().to(self._pool.device, non_blocking=True)

    def make_capture_metadata(self, slices: CapturedSlices) -> StepMetadata:
        metadata = StepMetadata()
        if slices.num_decodes:
            decodes = slices.decodes
            metadata.own_decodes = self._own_kernels.take_captured(decodes)
            if metadata.own_decodes is None:
                metadata.sub_batches.append(self._captured_decodes(decodes))
        if slices.prompt_indptr is not None:
            metadata.sub_batches.append(self._captured_prompts(slices.num_decodes, slices.prompts))
        return metadata

    def _captured_decodes(self, slices: CapturedSlices) -> _SubBatch:
        attention = FlashInferDecodes(self._pool, self._shape, slices.num_decodes)
        page_lists = _PageLists(slices.row_X, attention.indptr, attention.page_Z)
        decodes = slice(slices.num_decodes)
        return _SubBatch(attention, decodes, decodes, page_lists)

    def _captured_prompts(self, num_decodes: int, slices: CapturedSlices) -> _SubBatch:
        """One plan serves all graphs of as many slices and no more tokens: a replay plans anew.

        The first graph decides for how many tokens it is.
        """
        num_slices = len(slices.row_X)
        paged = self._graph_prompts.get(num_slices)
        if paged is None or not paged.room or slices.most_prompt_tokens > paged.room.num_tokens:
            room = GraphRoom(num_slices, slices.most_prompt_tokens, self._pool.graph_prompt_page_Z)
            paged = self._paged_prompts(room)
            self._graph_prompts[num_slices] = paged
        page_lists = _PageLists(slices.row_X, paged.indptr, paged.page_Z)
        return _SubBatch(paged, slice(None), slice(num_decodes, None), page_lists)

    def update_metadata(
        self, metadata: StepMetadata, start_X: IntArray, end_X: IntArray, first_token: int
    ) -> None:
        length_X = end_X - start_X
        for sub_batch in metadata.sub_batches:
            end_B = end_X[sub_batch.slices]
            if isinstance(sub_batch.attention, FlashInferDecodes):
                sub_batch.attention.plan(end_B)
            else:
                assert isinstance(sub_batch.attention, PagedPrompts), "as all that is captured"
                num_decodes = first_token + int(length_X[: sub_batch.slices.start].sum())
                sub_batch.attention.plan(length_X[sub_batch.slices], end_B, num_decodes)

    def prepare_on_device(self, queries: Queries, metadata: StepMetadata) -> None:
        kernels = triton_kernels_for(self._pool.page_table_RP)
        assert kernels is not None
        if metadata.own_decodes:
            self._own_kernels.plan(queries, metadata.own_decodes)
        for sub_batch in metadata.sub_batches:
            if sub_batch.page_lists:
                row_B, indptr, page_Z = sub_batch.page_lists
                kernels.list_pages(row_B, indptr, self._pool.page_table_RP, page_Z)

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer: int,
        queries: Queries,
        metadata: StepMetadata,
    ) -> Tensor:
        o_TNH = q_TNH.new_empty(q_TNH.shape)
        own_decodes = metadata.own_decodes
        writes_decodes = any(sub_batch.writes_decodes for sub_batch in metadata.sub_batches)
        if own_decodes and metadata.sub_batches and not writes_decodes:
            # Prompts before decodes: decodes go where prompts leave processors idle.
            try:
                with _fork(self._pool.prompt_stream):
                    self._run_sub_batches(q_TNH, k_TKH, v_TKH, layer, metadata, o_TNH)
                self._own_kernels.run(q_TNH, layer, queries, own_decodes, o_TNH, starts_early=False)
            finally:  # also if memory is full: the next step's plan goes where prompts read theirs
                _join(self._pool.prompt_stream)
            return o_TNH
        self._run_sub_batches(q_TNH, k_TKH, v_TKH, layer, metadata, o_TNH)
        if own_decodes:
            self._own_kernels.run(q_TNH, layer, queries, own_decodes, o_TNH, starts_early=True)
        return o_TNH

    def _run_sub_batches(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer: int,
        metadata: StepMetadata,
        o_TNH: Tensor,
    ) -> None:
        pages = self._pool.pages[layer]
        for sub_batch in metadata.sub_batches:
            tokens = sub_batch.tokens
            if isinstance(sub_batch.attention, RaggedPrompts):
                sub_batch.attention.run(q_TNH[tokens], k_TKH[tokens], v_TKH[tokens], o_TNH[tokens])
            else:
                sub_batch.attention.run(q_TNH[tokens], pages, o_TNH[tokens])


def _fork(stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
    """Let the calls of a block run on another stream, after all that the current one has so far."""
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def _join(stream: torch.cuda.Stream) -> None:
    """Let the current stream go on when another has done all that it has so far."""
    torch.cuda.current_stream().wait_stream(stream)


def _ends(slices: list[ReqSlice]) -> IntArray:
    return np.array([req_slice.end for req_slice in slices], dtype=np.int32)
