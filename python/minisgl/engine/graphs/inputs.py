"""The numbers that a captured graph reads of its tokens and requests.

    GraphInputs       those of a plan, on the host
    GraphNumbers      all numbers of a step, in the order in which they go to the device
    captured_queries  the tokens of a graph, as it reads them on the device

A plan is padded to the size of its graph: padding tokens stand in the padding row, at its first
positions. Like those of `steps.py`, the dataclasses that each step makes are not frozen, to be made
fast.
"""

# Dimensions: B requests of a step, or of a captured graph, T tokens of a step, or of a captured
# graph, X a selection out of another dimension.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from torch import Tensor

from minisgl.attention import CapturedSlices, group_arrays
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, Queries, ReqSlice
from minisgl.engine.graphs.key import GraphKey, GraphKind
from minisgl.engine.sampling_batch import ItemT, SamplingNumbers
from minisgl.engine.slice_tokens import SliceTokens
from minisgl.kernel import GroupTensors


@dataclass(slots=True)
class GraphInputs(ABC):
    """The arrays that graphs of all kinds read; int32.

    Attributes:
        sampling_slices: of the plan.
        row_T, position_T: where in the tables each token stands.
        row_B, end_B: row and end of each slice that samples. Padding comes last: the first position
            of the padding row.
        attn_start_X, attn_end_X: the slices that attention gets.
        groups: the arrays of `GroupTensors`; empty if the graph has room for none.
    """

    sampling_slices: list[ReqSlice]
    row_T: IntArray
    position_T: IntArray
    row_B: IntArray
    end_B: IntArray
    attn_start_X: IntArray
    attn_end_X: IntArray
    groups: Sequence[IntArray]

    @abstractmethod
    def token_arrays(self) -> list[IntArray]:
        """The arrays that go to the device, in the order that `captured_queries` expects."""


@dataclass(slots=True)
class DecodeInputs(GraphInputs):
    """One token per request; attention gets each as a slice, padding included."""

    @classmethod
    def of(cls, plan: BatchPlan, key: GraphKey, padding_row: int) -> DecodeInputs:
        """The inputs for a plan of decodes; if it has no slices, for padding alone."""
        num_decodes = len(plan.slices)
        size = key.num_decodes
        row_B = np.full(size, padding_row, dtype=np.int32)
        row_B[:num_decodes] = [req_slice.row for req_slice in plan.slices]
        end_B = np.ones(size, dtype=np.int32)
        end_B[:num_decodes] = [req_slice.end for req_slice in plan.slices]
        position_B = end_B - 1
        return cls(
            sampling_slices=plan.slices,
            row_T=row_B,
            position_T=position_B,
            row_B=row_B,
            end_B=end_B,
            attn_start_X=position_B,
            attn_end_X=end_B,
            groups=_group_arrays(plan, key),
        )

    def token_arrays(self) -> list[IntArray]:
        return [self.row_T, self.position_T, *self.groups]


@dataclass(slots=True)
class PromptInputs(GraphInputs):
    """Decodes, then prompts, and then padding.

    Attention gets each decode and each prompt as a slice, with empty slices in place of missing
    ones, and all padding as one slice, the last.

    Attributes:
        slice_row_X: the rows of the slices that attention gets.
        decode_position_B: of each decode that the graph has room for; -1 where one is missing.
        prompt_indptr: where the slices after the decodes begin among all tokens, and their end.
        returned_index_B: of each slice that samples, the index of its last token.
    """

    slice_row_X: IntArray
    decode_position_B: IntArray
    prompt_indptr: IntArray
    returned_index_B: IntArray

    @classmethod
    def of(cls, plan: BatchPlan, key: GraphKey, padding_row: int) -> PromptInputs:
        """The inputs for a plan; if it has no slices, for padding alone."""
        num_decodes = plan.num_decodes if key.num_decodes else 0
        decodes = plan.slices[:num_decodes]
        prompts = plan.slices[num_decodes:]

        # The slices that attention sees.
        slice_row_X = np.full(key.num_slices + 1, padding_row, dtype=np.int32)
        start_X = np.zeros(key.num_slices + 1, dtype=np.int32)
        end_X = np.zeros(key.num_slices + 1, dtype=np.int32)
        for first, slices in ((0, decodes), (key.num_decodes, prompts)):
            where = slice(first, first + len(slices))
            slice_row_X[where] = [req_slice.row for req_slice in slices]
            start_X[where] = [req_slice.start for req_slice in slices]
            end_X[where] = [req_slice.end for req_slice in slices]
        end_X[-1] = key.num_tokens - len(decodes) - sum(map(len, prompts))
        tokens = SliceTokens.of(slice_row_X, start_X, end_X)

        # Those that sample: no more than there are rows of requests, which the padding row follows.
        most_sampling = min(key.num_slices, padding_row)
        row_B = np.full(most_sampling, padding_row, dtype=np.int32)
        end_B = np.ones(most_sampling, dtype=np.int32)
        returned_index_B = np.zeros(most_sampling, dtype=np.int32)
        indices = [i for i, decode in enumerate(decodes) if decode.samples]
        indices += [key.num_decodes + i for i, prompt in enumerate(prompts) if prompt.samples]
        sampling = np.array(indices, dtype=np.int64)
        row_B[: len(sampling)] = slice_row_X[sampling]
        end_B[: len(sampling)] = end_X[sampling]
        returned_index_B[: len(sampling)] = tokens.last_X[sampling]

        prompt_indptr = np.empty(key.num_slices + 2 - key.num_decodes, dtype=np.int32)
        prompt_indptr[:-1] = tokens.first_X[key.num_decodes :]
        prompt_indptr[-1] = key.num_tokens
        return cls(
            sampling_slices=plan.sampling_slices,
            row_T=tokens.row_T,
            position_T=tokens.position_T,
            row_B=row_B,
            end_B=end_B,
            attn_start_X=start_X,
            attn_end_X=end_X,
            groups=_group_arrays(plan, key),
            slice_row_X=slice_row_X,
            decode_position_B=end_X[: key.num_decodes] - 1,
            prompt_indptr=prompt_indptr,
            returned_index_B=returned_index_B,
        )

    def token_arrays(self) -> list[IntArray]:
        slices = [self.slice_row_X, self.decode_position_B, self.prompt_indptr]
        returned = [self.row_B, self.end_B - 1, self.returned_index_B]
        return [self.row_T, self.position_T, *self.groups, *slices, *returned]


def _group_arrays(plan: BatchPlan, key: GraphKey) -> Sequence[IntArray]:
    """Those of `group_arrays`, if the graph has room for groups."""
    if not key.num_groups:
        return ()
    return group_arrays(plan.prefix_groups, key.num_decodes, key.num_groups)


def graph_inputs(plan: BatchPlan, key: GraphKey, padding_row: int) -> GraphInputs:
    """The inputs of the graph of a key, from a plan."""
    if key.kind is GraphKind.WITH_PROMPTS:
        return PromptInputs.of(plan, key, padding_row)
    return DecodeInputs.of(plan, key, padding_row)


@dataclass(slots=True)
class GraphNumbers(Generic[ItemT]):
    """All numbers of a step: as they are staged on the host, or where its graphs read them.

    Attributes:
        page_writes, token_writes: int32, flat indices into the tables, and what is written there.
        sampled_index: int32, flat indices into the token pool; where the sampled tokens go.
        tokens: those of `GraphInputs.token_arrays`.
    """

    page_writes: tuple[ItemT, ItemT]
    token_writes: tuple[ItemT, ItemT]
    sampled_index: ItemT
    sampling: SamplingNumbers[ItemT]
    tokens: Sequence[ItemT]

    def in_order(self) -> list[ItemT]:
        """As they go to the device."""
        writes = [*self.page_writes, *self.token_writes]
        return [*writes, self.sampled_index, *self.sampling, *self.tokens]

    @classmethod
    def of(cls, items: Sequence[ItemT]) -> GraphNumbers[ItemT]:
        """Undo `in_order`."""
        page_index, pages, token_index, tokens, sampled_index, *others = items
        num_sampling = len(SamplingNumbers._fields)
        return cls(
            page_writes=(page_index, pages),
            token_writes=(token_index, tokens),
            sampled_index=sampled_index,
            sampling=SamplingNumbers(*others[:num_sampling]),
            tokens=others[num_sampling:],
        )


def captured_queries(
    key: GraphKey,
    tensors: Sequence[Tensor],
    make_metadata: Callable[[CapturedSlices], BaseAttnMetadata],
) -> tuple[Queries, Queries | None]:
    """The queries of a captured step, and those of them that are returned, as in `Batch`.

    Args:
        tensors: those of `GraphInputs.token_arrays`, where the graph reads them.
        make_metadata: the attention backend's.
    """
    row_T, position_T, *others = tensors
    groups = None
    if key.num_groups:
        num_shared_B, member_B, indptr, *others = others
        groups = GroupTensors(num_shared_B, member_B, indptr)
    if key.kind is not GraphKind.WITH_PROMPTS:
        decodes = CapturedSlices(row_T, position_T, groups=groups)
        return Queries(row_T, position_T, make_metadata(decodes)), None

    slice_row_X, decode_position_B, prompt_indptr, row_B, position_B, index_B = others
    slices = CapturedSlices(
        slice_row_X,
        decode_position_B,
        key.num_tokens,
        prompt_indptr,
        groups=groups,
        beside_prompts=True,
    )
    queries = Queries(row_T, position_T, make_metadata(slices))
    last_tokens = CapturedSlices(row_B, position_B, beside_prompts=True)
    return queries, Queries(row_B, position_B, make_metadata(last_tokens), index_B)
