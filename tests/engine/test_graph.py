"""Which recorded graph takes a plan."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import BatchPlan, Req, ReqSlice, SamplingParams
from minisgl.engine.graph import Kind, fit, ladder, sizes


def plan(
    lengths: list[int],
    *,
    num_shared_tokens: int = 0,
    samples: bool = True,
    params: SamplingParams | None = None,
) -> BatchPlan:
    req = Req(0, np.zeros(1, dtype=np.int32), params or SamplingParams(), max_length=2, seed=0)
    return BatchPlan(
        [ReqSlice(req, 500, 500 + length, samples) for length in lengths],
        num_shared_tokens=num_shared_tokens,
    )


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 100, 256])
def test_the_ladder_rises_to_the_largest_and_pads_by_less_than_eight(largest: int) -> None:
    steps = ladder(largest)
    assert steps == sorted(set(steps)) and steps[-1] == largest
    assert all(next(step for step in steps if step >= n) - n < 8 for n in range(1, largest + 1))


@pytest.mark.parametrize("num_shared_tokens", [0, 255, 256, 4096])
@pytest.mark.parametrize("max_decodes", [1, 20, 100, 256])
def test_every_number_of_decodes_up_to_the_largest_has_a_graph(
    max_decodes: int, num_shared_tokens: int
) -> None:
    recorded = sizes(max_decodes, 1024)
    for number in range(1, max_decodes + 1):
        found = fit(plan([1] * number, num_shared_tokens=num_shared_tokens), recorded)
        assert found is not None
        kind, size = found
        assert size >= number and size in recorded[kind]
        assert kind is (Kind.SHARING if num_shared_tokens >= 256 and number >= 16 else Kind.DECODES)
    assert fit(plan([1] * (max_decodes + 1)), recorded) is None


@pytest.mark.parametrize(
    ("lengths", "samples", "expected"),
    [
        ([2], True, (Kind.PROMPT, 32)),
        ([512], True, (Kind.PROMPT, 512)),
        ([513], False, (Kind.PROMPT, 1024)),
        ([1], False, (Kind.PROMPT, 32)),
        ([1025], True, None),
        ([1, 2], True, None),
        ([5, 5], True, None),
    ],
)
def test_one_short_prompt_has_a_graph(
    lengths: list[int], samples: bool, expected: tuple[Kind, int] | None
) -> None:
    assert fit(plan(lengths, samples=samples), sizes(256, 1024)) == expected


def test_a_model_too_large_for_prompt_graphs_has_none() -> None:
    assert fit(plan([20]), sizes(256, 0)) is None


@pytest.mark.parametrize(("length", "expected"), [(1, Kind.DECODES), (2, None)])
def test_a_prompt_of_which_all_hidden_states_are_wanted_has_none(
    length: int, expected: Kind | None
) -> None:
    """A graph returns those of last tokens."""
    found = fit(plan([length], params=SamplingParams(prompt_logprobs=0)), sizes(256, 1024))
    assert (found and found[0]) is expected
