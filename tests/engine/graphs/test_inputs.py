"""What a captured graph reads of a plan, padding included."""

# Dimensions: T tokens of a step.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from minisgl.attention import CapturedSlices
from minisgl.core import (
    BaseAttnMetadata,
    BatchPlan,
    PrefixGroup,
    Queries,
    Req,
    ReqSlice,
    SamplingParams,
)
from minisgl.engine.graphs.inputs import (
    DecodeInputs,
    GraphInputs,
    PromptInputs,
    captured_queries,
    graph_inputs,
)
from minisgl.engine.graphs.key import GraphKey

PADDING_ROW = 9


def req_slice(row: int, start: int, end: int, *, samples: bool = True) -> ReqSlice:
    req = Req(row, np.zeros(1, dtype=np.int32), SamplingParams(), max_length=2, seed=0)
    req.row = row
    return ReqSlice(req, start, end, samples)


def test_decodes_are_padded_with_first_tokens_of_the_padding_row() -> None:
    plan = BatchPlan([req_slice(3, 10, 11), req_slice(0, 6, 7)])
    inputs = graph_inputs(plan, GraphKey(4, 4), PADDING_ROW)
    assert isinstance(inputs, DecodeInputs)
    assert inputs.row_T.tolist() == inputs.row_B.tolist() == [3, 0, PADDING_ROW, PADDING_ROW]
    assert inputs.position_T.tolist() == inputs.attn_start_X.tolist() == [10, 6, 0, 0]
    assert inputs.end_B.tolist() == inputs.attn_end_X.tolist() == [11, 7, 1, 1]
    assert inputs.groups == ()


def test_groups_follow_each_other_and_those_that_are_missing_are_empty() -> None:
    groups = [PrefixGroup(3200, [1, 2, 4]), PrefixGroup(64, [0, 5])]
    decodes = [req_slice(row % PADDING_ROW, 9000, 9001) for row in range(7)]
    plan = BatchPlan(decodes, prefix_groups=groups)
    for key in (
        GraphKey(24, 24, has_groups=True),
        GraphKey(24, 24, 1, has_groups=True),
    ):
        num_shared_B, member_B, indptr = graph_inputs(plan, key, PADDING_ROW).groups
        assert num_shared_B.tolist() == [64, 3200, 3200, 0, 3200, 64] + [0] * 18
        assert member_B.tolist()[:5] == [1, 2, 4, 0, 5]
        assert indptr.tolist() == [0, 3, 5, 5]


def test_a_prompt_is_padded_with_a_slice_of_the_padding_row() -> None:
    plan = BatchPlan([req_slice(3, 10, 13)])
    inputs = graph_inputs(plan, GraphKey(5, 0, 1), PADDING_ROW)
    assert isinstance(inputs, PromptInputs)
    assert inputs.row_T.tolist() == [3, 3, 3, PADDING_ROW, PADDING_ROW]
    assert inputs.position_T.tolist() == [10, 11, 12, 0, 1]
    assert (inputs.row_B.tolist(), inputs.end_B.tolist()) == ([3], [13])
    assert inputs.attn_start_X.tolist() == [10, 0]
    assert inputs.attn_end_X.tolist() == [13, 2]
    assert inputs.slice_row_X.tolist() == [3, PADDING_ROW]
    assert inputs.prompt_indptr.tolist() == [0, 3, 5]
    assert inputs.returned_index_B.tolist() == [2]


def test_prompts_follow_the_decodes_that_are_there_and_padding_follows_all() -> None:
    """Those that sample come first, without gaps; what is missing are slices of no tokens."""
    plan = BatchPlan(
        [
            req_slice(3, 10, 11),
            req_slice(4, 6, 7, samples=False),
            req_slice(5, 0, 2),
            req_slice(6, 7, 9, samples=False),
            req_slice(7, 4, 6),
        ]
    )
    inputs = graph_inputs(plan, GraphKey(11, 3, 4), PADDING_ROW)
    assert isinstance(inputs, PromptInputs)
    assert inputs.row_T.tolist() == [3, 4, 5, 5, 6, 6, 7, 7] + [PADDING_ROW] * 3
    assert inputs.position_T.tolist() == [10, 6, 0, 1, 7, 8, 4, 5, 0, 1, 2]
    assert inputs.slice_row_X.tolist() == [3, 4, PADDING_ROW, 5, 6, 7, PADDING_ROW, PADDING_ROW]
    assert inputs.attn_start_X.tolist() == [10, 6, 0, 0, 7, 4, 0, 0]
    assert inputs.attn_end_X.tolist() == [11, 7, 0, 2, 9, 6, 0, 3]
    assert inputs.decode_position_B.tolist() == [10, 6, -1]
    assert inputs.prompt_indptr.tolist() == [2, 4, 6, 8, 8, 11]
    assert [req_slice.row for req_slice in inputs.sampling_slices] == [3, 5, 7]
    assert inputs.row_B.tolist() == [3, 5, 7] + [PADDING_ROW] * 4
    assert inputs.end_B.tolist() == [11, 2, 6] + [1] * 4
    assert inputs.returned_index_B.tolist() == [0, 3, 7] + [0] * 4


def test_no_more_slices_sample_than_there_are_rows() -> None:
    """Attention's own buffers have a place for each row, and one for padding."""
    key = GraphKey(40, PADDING_ROW, 4)
    plan = BatchPlan(
        [
            *(req_slice(row, 6, 7) for row in range(PADDING_ROW - 1)),
            req_slice(PADDING_ROW - 1, 0, 9),
        ]
    )
    inputs = graph_inputs(plan, key, PADDING_ROW)
    assert inputs.row_B.tolist() == [*range(PADDING_ROW)]
    _, returned = queries_of(key, inputs)
    assert returned is not None
    assert len(returned.row_X) == PADDING_ROW


@dataclass(frozen=True)
class Metadata(BaseAttnMetadata):
    """Of no backend."""

    slices: CapturedSlices


def queries_of(key: GraphKey, inputs: GraphInputs) -> tuple[Queries, Queries | None]:
    tensors = [torch.from_numpy(array) for array in inputs.token_arrays()]
    return captured_queries(key, tensors, Metadata)


def slices_of(queries: Queries) -> CapturedSlices:
    """Those that the metadata was made of."""
    assert isinstance(queries.attn_metadata, Metadata)
    return queries.attn_metadata.slices


KEYS = [
    GraphKey(32, 32),
    GraphKey(32, 32, has_groups=True),
    GraphKey(32, 0, 1),
    GraphKey(40, 8, 4),
    GraphKey(60, 50, 4),
    GraphKey(60, 50, 4, has_groups=True),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_plan_without_slices_is_padding_alone(key: GraphKey) -> None:
    inputs = graph_inputs(BatchPlan([]), key, PADDING_ROW)
    assert set(inputs.row_T.tolist()) == {PADDING_ROW}
    assert set(inputs.row_B.tolist()) == {PADDING_ROW}
    assert len(inputs.row_T) == len(inputs.position_T) == key.num_tokens
    assert (inputs.attn_end_X - inputs.attn_start_X).sum() == key.num_tokens
    assert {array.dtype for array in inputs.token_arrays()} == {np.dtype(np.int32)}


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_graph_reads_under_each_name_what_the_host_has_under_it(key: GraphKey) -> None:
    plan = BatchPlan(
        [req_slice(3, 10, 11), req_slice(0, 6, 7)], prefix_groups=[PrefixGroup(4, [1, 0])]
    )
    if key.num_decodes == 0:
        plan = BatchPlan([req_slice(3, 10, 30)])
    inputs = graph_inputs(plan, key, PADDING_ROW)
    queries, returned = queries_of(key, inputs)
    assert queries.row_X.tolist() == inputs.row_T.tolist()
    assert queries.position_X.tolist() == inputs.position_T.tolist()
    slices = slices_of(queries)
    assert slices.num_decodes == key.num_decodes
    groups = slices.groups
    assert (groups is not None) == (key.num_groups > 0)
    if groups:
        assert groups.num_shared_B[:3].tolist() == [4, 4, 0]
        assert groups.member_B[:2].tolist() == [1, 0]
        assert groups.indptr.tolist() == [0, 2] + [2] * (key.num_groups - 1)
        assert len(groups.num_shared_B) == len(groups.member_B) == key.num_decodes
    if isinstance(inputs, PromptInputs):
        assert returned is not None
        assert returned.index_X is not None
        assert returned.row_X.tolist() == inputs.row_B.tolist()
        assert returned.position_X.tolist() == (inputs.end_B - 1).tolist()
        assert returned.index_X.tolist() == inputs.returned_index_B.tolist()
        last_tokens = slices_of(returned)
        assert last_tokens.beside_prompts
        assert last_tokens.row_X is returned.row_X
        assert last_tokens.decode_position_B is returned.position_X
        assert slices.prompt_indptr is not None
        assert slices.prompt_indptr.tolist() == inputs.prompt_indptr.tolist()
        assert slices.row_X.tolist() == inputs.slice_row_X.tolist()
        assert slices.decode_position_B.tolist() == inputs.decode_position_B.tolist()
        return
    assert returned is None
    assert slices.row_X.tolist() == inputs.row_T.tolist()
    assert slices.decode_position_B.tolist() == inputs.position_T.tolist()
