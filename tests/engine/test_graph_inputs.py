"""What a captured graph reads of a plan, padding included."""

# Dimensions: T tokens of a step.

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import BatchPlan, Req, ReqSlice, SamplingParams
from minisgl.engine.graph_inputs import DecodeInputs, SliceInputs, graph_inputs
from minisgl.engine.graph_key import GraphKey, GraphKind

PADDING_ROW = 9


def req_slice(row: int, start: int, end: int) -> ReqSlice:
    req = Req(row, np.zeros(1, dtype=np.int32), SamplingParams(), max_length=2, seed=0)
    req.row = row
    return ReqSlice(req, start, end, samples=True)


def test_decodes_are_padded_with_first_tokens_of_the_padding_row() -> None:
    plan = BatchPlan([req_slice(3, 10, 11), req_slice(0, 6, 7)], num_shared_tokens=5)
    inputs = graph_inputs(plan, GraphKey(GraphKind.SHARED_PREFIX, 4), PADDING_ROW)
    assert isinstance(inputs, DecodeInputs)
    assert inputs.row_T.tolist() == inputs.row_B.tolist() == [3, 0, PADDING_ROW, PADDING_ROW]
    assert inputs.position_T.tolist() == inputs.attn_start_X.tolist() == [10, 6, 0, 0]
    assert inputs.end_B.tolist() == inputs.attn_end_X.tolist() == [11, 7, 1, 1]
    assert inputs.num_shared_tokens == 5


def test_a_prompt_is_padded_with_a_slice_of_the_padding_row() -> None:
    plan = BatchPlan([req_slice(3, 10, 13)])
    inputs = graph_inputs(plan, GraphKey(GraphKind.ONE_SLICE, 5), PADDING_ROW)
    assert isinstance(inputs, SliceInputs)
    assert inputs.row_T.tolist() == [3, 3, 3, PADDING_ROW, PADDING_ROW]
    assert inputs.position_T.tolist() == [10, 11, 12, 0, 1]
    assert (inputs.row_B.tolist(), inputs.end_B.tolist()) == ([3], [13])
    assert inputs.attn_start_X.tolist() == [10, 0]
    assert inputs.attn_end_X.tolist() == [13, 2]
    assert (inputs.row, inputs.padding_row, inputs.last_index) == (3, PADDING_ROW, 2)


@pytest.mark.parametrize("kind", GraphKind)
def test_a_plan_without_slices_is_padding_alone(kind: GraphKind) -> None:
    inputs = graph_inputs(BatchPlan([]), GraphKey(kind, 32), PADDING_ROW)
    assert set(inputs.row_T.tolist()) == {PADDING_ROW}
    assert set(inputs.row_B.tolist()) == {PADDING_ROW}
    assert (inputs.attn_start_X < inputs.attn_end_X).all()
    assert {array.dtype for array in inputs.token_arrays()} == {np.dtype(np.int32)}
