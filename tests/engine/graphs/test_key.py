"""Which captured graph takes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from minisgl.core import (
    FEWEST_IN_GROUP,
    BatchPlan,
    PrefixGroup,
    Req,
    ReqSlice,
    RowCopy,
    SamplingParams,
    TableWrites,
)
from minisgl.engine.graphs.key import (
    GraphKey,
    GraphKind,
    find_graph_key,
    has_room_for_writes,
    unpadded_prompt_sizes,
)
from minisgl.engine.graphs.sizes import cpu_graph_keys, gpu_graph_keys


def plan(
    lengths: list[int],
    *,
    start: int = 500,
    groups: Sequence[PrefixGroup] = (),
    samples: bool = True,
) -> BatchPlan:
    req = Req(0, np.zeros(1, dtype=np.int32), SamplingParams(), max_length=2, seed=0)
    slices = [ReqSlice(req, start, start + length, samples) for length in lengths]
    return BatchPlan(slices, prefix_groups=groups)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("max_decodes", [1, 20, 100, 256, 512])
def test_every_number_of_decodes_up_to_the_largest_has_a_graph(
    max_decodes: int, shares: bool
) -> None:
    keys = gpu_graph_keys(max_decodes, 1024)
    for number in range(1, max_decodes + 1):
        shares_prefix = shares and number >= FEWEST_IN_GROUP
        groups = [PrefixGroup(16, list(range(number)))] if shares_prefix else []
        decodes = plan([1] * number, groups=groups)
        key = find_graph_key(decodes, keys)
        assert key is not None
        assert key.num_decodes == key.num_tokens >= number
        assert key in keys[GraphKind.DECODES]
        assert key.has_groups == shares_prefix
    assert find_graph_key(plan([1] * (max_decodes + 1)), keys) is None


def decodes(size: int, *, has_groups: bool = False) -> GraphKey:
    return GraphKey(size, size, has_groups=has_groups)


def with_prompts(
    num_tokens: int, num_decodes: int, num_prompts: int, *, has_groups: bool = False
) -> GraphKey:
    return GraphKey(num_tokens, num_decodes, num_prompts, has_groups=has_groups)


@pytest.mark.parametrize(
    ("lengths", "samples", "expected"),
    [
        ([2], True, with_prompts(32, 0, 1)),
        ([512], True, with_prompts(512, 0, 1)),
        ([513], False, with_prompts(640, 64, 64)),
        ([1], False, with_prompts(32, 0, 1)),
        ([1025], True, with_prompts(1152, 64, 64)),
        ([2048], True, with_prompts(2048, 64, 64)),
        ([2049], True, None),
        ([1, 2], True, with_prompts(128, 64, 16)),
        ([1, 1, 1], False, with_prompts(128, 64, 16)),
        ([5, 5], True, with_prompts(128, 64, 16)),
        ([1] * 32 + [96], True, with_prompts(128, 64, 16)),
        ([1] * 32 + [128] * 4, True, with_prompts(640, 64, 64)),
        ([1] * 64 + [128] * 4, False, with_prompts(640, 64, 64)),
        ([1] * 64 + [65], False, with_prompts(256, 64, 16)),
        ([1] * 65 + [63], False, with_prompts(256, 128, 16)),
        ([1] * 100 + [412], False, with_prompts(512, 128, 16)),
        ([1] * 256 + [128] * 14, True, with_prompts(2048, 256, 64)),
        ([1] * 256 + [1793], True, None),
        ([1] * 257 + [3], True, None),
        ([1] * 9 + [5] * 17, True, with_prompts(640, 64, 64)),
        ([1] * 9 + [5] * 65, True, None),
    ],
    ids=str,
)
def test_prompts_have_the_smallest_graph_that_has_room(
    lengths: list[int], samples: bool, expected: GraphKey | None
) -> None:
    assert find_graph_key(plan(lengths, samples=samples), gpu_graph_keys(256, 2048)) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1] * 16 + [40], with_prompts(128, 64, 16, has_groups=True)),
        ([1] * 16 + [128], with_prompts(256, 256, 16, has_groups=True)),
        ([1] * 300 + [200], with_prompts(512, 512, 16, has_groups=True)),
        ([1] * 20 + [20] * 17, with_prompts(640, 512, 64, has_groups=True)),
        ([1] * 512 + [512], with_prompts(1024, 512, 64, has_groups=True)),
        ([1] * 20 + [4076], with_prompts(4096, 512, 64, has_groups=True)),
        ([1] * 20 + [4077], None),
    ],
    ids=str,
)
def test_groups_beside_prompts_have_one_graph_for_each_number_of_tokens(
    lengths: list[int], expected: GraphKey | None
) -> None:
    sharing = plan(lengths, groups=[PrefixGroup(16, list(range(16)))])
    assert find_graph_key(sharing, gpu_graph_keys(512, 4096)) == expected


@pytest.mark.parametrize("num_tokens", [*range(17, 140), 200, 500, 640, 641, 1900])
@pytest.mark.parametrize("num_decodes", [16, 17, 63, 64, 65, 100])
def test_groups_lead_to_a_graph_of_as_many_tokens(num_tokens: int, num_decodes: int) -> None:
    """So a step of a size without padding has none with groups either."""
    for max_decodes in (16, 40, 100, 256, 512):
        keys = gpu_graph_keys(max_decodes, 2048)
        lengths = [1] * num_decodes + [max(2, num_tokens - num_decodes)]
        apart = find_graph_key(plan(lengths), keys)
        together = find_graph_key(plan(lengths, groups=[PrefixGroup(16, [0])]), keys)
        if apart is None:
            assert together is None
            continue
        assert together is not None
        assert (apart.has_groups, together.has_groups) == (False, True)
        assert apart.num_tokens == together.num_tokens


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1] * 9 + [128] * 17, with_prompts(2560, 256, 64)),
        ([1] * 256 + [128] * 30, with_prompts(4096, 256, 64)),
        ([2049], with_prompts(2560, 256, 64)),
        ([1] * 9 + [4088], None),
    ],
    ids=str,
)
def test_long_steps_of_a_small_model_have_room_for_all_decodes(
    lengths: list[int], expected: GraphKey | None
) -> None:
    assert find_graph_key(plan(lengths), gpu_graph_keys(256, 4096)) == expected


@pytest.mark.parametrize("num_decodes", [1, 33, 64, 200, 256])
def test_a_step_with_as_many_tokens_as_it_has_room_for_has_no_padding_among_them(
    num_decodes: int,
) -> None:
    keys = gpu_graph_keys(256, 4096)
    sizes = unpadded_prompt_sizes(keys, num_decodes)
    assert sizes == sorted(set(sizes))
    assert 32 <= sizes[0] <= 184
    assert sizes[-1] == 4096 - num_decodes
    for size in sizes:
        key = find_graph_key(plan([1] * num_decodes + [size]), keys)
        assert key is not None
        assert key.num_tokens == num_decodes + size


def test_beside_too_many_decodes_there_is_no_room() -> None:
    assert unpadded_prompt_sizes(gpu_graph_keys(256, 2048), 257) == []
    assert unpadded_prompt_sizes(gpu_graph_keys(256, 0), 1) == []


@pytest.mark.parametrize(
    ("lengths", "samples", "expected"),
    [
        ([1] * 3, True, decodes(3)),
        ([1] * 9, True, decodes(12)),
        ([1] * 65, True, None),
        ([30], True, with_prompts(32, 0, 1)),
        ([65], True, with_prompts(80, 16, 4)),
        ([97], True, None),
        ([1, 20], True, with_prompts(24, 4, 4)),
        ([1, 23], True, with_prompts(24, 4, 4)),
        ([1, 63], True, with_prompts(64, 4, 4)),
        ([1, 64], True, with_prompts(80, 16, 4)),
        ([1] * 8 + [20], False, with_prompts(32, 8, 4)),
        ([1] * 8 + [20] * 3, False, with_prompts(80, 16, 4)),
        ([1] * 8 + [4] * 5, False, None),
        ([1] * 33 + [20], False, None),
    ],
    ids=str,
)
def test_a_cpu_captures_steps_of_few_tokens(
    lengths: list[int], samples: bool, expected: GraphKey | None
) -> None:
    keys = cpu_graph_keys(256, 1000, 128)
    assert find_graph_key(plan(lengths, samples=samples), keys) == expected


def test_where_nothing_is_captured_for_shared_prefixes_they_are_read_apart() -> None:
    sharing = plan([1] * 32, groups=[PrefixGroup(496, list(range(32)))])
    assert find_graph_key(sharing, cpu_graph_keys(64, 4095, 128)) == decodes(32)


def test_a_model_too_large_for_prompt_graphs_has_none() -> None:
    assert find_graph_key(plan([20]), gpu_graph_keys(256, 0)) is None


@pytest.mark.parametrize(("length", "expected"), [(1, decodes(1)), (2, None)])
def test_a_prompt_of_which_all_hidden_states_are_wanted_has_none(
    length: int, expected: GraphKey | None
) -> None:
    """A graph returns those of last tokens."""
    scored = BatchPlan([ReqSlice(scored_request(length), 0, length, samples=True)])
    assert find_graph_key(scored, gpu_graph_keys(256, 1024)) == expected


def test_what_follows_a_scored_prompt_has_a_graph() -> None:
    """Nor does its last token, by itself, tell anything about the prompt."""
    keys = gpu_graph_keys(256, 1024)
    prompt = plan([40]).slices
    for start in (20, 19):
        slices = [ReqSlice(scored_request(20), start, start + 1, samples=True), *prompt]
        assert find_graph_key(BatchPlan(slices), keys) is not None


def scored_request(num_prompt: int) -> Req:
    prompt = np.zeros(num_prompt, dtype=np.int32)
    return Req(0, prompt, SamplingParams(prompt_logprobs=0), max_length=num_prompt + 2, seed=0)


@pytest.mark.parametrize(
    ("num_pages", "num_tokens", "key", "expected"),
    [
        (0, 0, decodes(1), True),
        (8, 0, decodes(8), True),
        (17, 0, decodes(16, has_groups=True), False),
        (0, 1, decodes(8), False),
        (5, 64, with_prompts(64, 0, 1), True),
        (6, 0, with_prompts(64, 0, 1), False),
        (1, 65, with_prompts(64, 0, 1), False),
        (54, 96, with_prompts(96, 32, 16), True),
        (55, 96, with_prompts(96, 32, 16), False),
    ],
)
def test_a_graph_has_room_for_a_page_a_slice_and_the_pages_and_tokens_of_its_prompts(
    num_pages: int, num_tokens: int, key: GraphKey, expected: bool
) -> None:
    pages = np.zeros(num_pages, dtype=np.int32)
    tokens = np.zeros(num_tokens, dtype=np.int32)
    writes = TableWrites(pages, pages, tokens, tokens)
    assert has_room_for_writes(key, writes, page_size=16) == expected
    copied = replace(writes, copies=(RowCopy(0, 1, 16),))
    assert not has_room_for_writes(key, copied, page_size=16)
