"""Which sizes of steps are captured."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import replace

import pytest

from minisgl.core import FEWEST_IN_GROUP
from minisgl.engine.graphs.key import GraphKind, unpadded_prompt_sizes
from minisgl.engine.graphs.sizes import (
    cpu_graph_keys,
    gpu_graph_keys,
    most_decodes,
    most_tokens_with_prompts,
    size_ladder,
)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 100, 255, 256, 257, 500, 512])
def test_the_ladder_rises_to_the_largest_and_pads_by_less_than_an_eighth(largest: int) -> None:
    sizes = size_ladder(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for num_decodes in range(1, largest + 1):
        num_padded = next(size for size in sizes if size >= num_decodes) - num_decodes
        assert num_padded < max(8, num_decodes / 8)


def test_all_running_requests_are_captured_up_to_a_limit_if_nothing_is_asked_for() -> None:
    assert most_decodes(None, 300) == 300
    assert most_decodes(None, 4096) == 512
    assert most_decodes(1024, 4096) == 1024
    assert most_decodes(8, 300) == 8
    assert most_decodes(0, 300) == 0


@pytest.mark.parametrize(
    ("weight_bytes", "expected"),
    [
        (1.19e9, range(4096, 6144)),
        (1.6e9, range(3072, 3584)),
        (3.4e9, (2048,)),
        (6.1e9, (2048,)),
        (28e9, range(1536, 2048)),
    ],
    ids=["Qwen3-0.6B", "a larger one", "Qwen3-1.7B", "Qwen3-30B-A3B", "Qwen3-14B"],
)
def test_long_steps_are_captured_where_the_host_takes_longer_than_the_device(
    weight_bytes: float, expected: Container[int]
) -> None:
    assert most_tokens_with_prompts(40_960, int(weight_bytes)) in expected
    assert most_tokens_with_prompts(1000, int(weight_bytes)) == 1000


@pytest.mark.parametrize("max_decodes", [8, 13, 16, 100, 256, 300, 512])
def test_decodes_in_groups_have_graphs_with_little_padding(max_decodes: int) -> None:
    keys = gpu_graph_keys(max_decodes, 2048)[GraphKind.DECODES]
    sizes = [key.num_decodes for key in keys if key.has_groups]
    assert sizes[0] == FEWEST_IN_GROUP
    for num_decodes in range(FEWEST_IN_GROUP, max_decodes + 1):
        num_padded = next(size for size in sizes if size >= num_decodes) - num_decodes
        assert num_padded < max(16, num_decodes / 8)


@pytest.mark.parametrize("max_decodes", [1, 3, 6, 20, 256])
@pytest.mark.parametrize("max_tokens", [1, 30, 1000])
@pytest.mark.parametrize("most_of_kernel", [0, 128, sys.maxsize])
def test_what_a_cpu_captures_is_within_the_options(
    max_decodes: int, max_tokens: int, most_of_kernel: int
) -> None:
    by_kind = cpu_graph_keys(max_decodes, max_tokens, most_of_kernel)
    for keys in by_kind.values():
        sizes = [(key.num_tokens, key.num_decodes) for key in keys]
        assert sizes == sorted(set(sizes))
        assert all(key.num_decodes <= max_decodes for key in keys)
    most = min(max_tokens, most_of_kernel)
    assert all(key.num_tokens <= most for key in by_kind[GraphKind.WITH_PROMPTS])
    assert by_kind[GraphKind.DECODES][-1].num_decodes == min(max_decodes, 64)


def test_many_decodes_of_a_cpu_have_graphs_for_chunks_that_keep_up_with_prompts() -> None:
    keys = cpu_graph_keys(256, 1000, sys.maxsize)
    assert unpadded_prompt_sizes(keys, 64) == [16, 32, 64, 96, 128]
    assert unpadded_prompt_sizes(keys, 40)[-1] == 152
    without_unit = cpu_graph_keys(256, 1000, 128)
    assert unpadded_prompt_sizes(without_unit, 32)[-1] == 64
    assert unpadded_prompt_sizes(without_unit, 33) == []


@pytest.mark.parametrize("max_decodes", [16, 100, 512])
def test_the_last_graph_of_each_kind_is_the_largest_with_groups(max_decodes: int) -> None:
    """It is captured first, and makes the memory that the others use."""
    for keys in gpu_graph_keys(max_decodes, 2048).values():
        *_, other, last = keys
        assert last == replace(other, has_groups=True) != other
        assert last.num_tokens == max(key.num_tokens for key in keys)


@pytest.mark.parametrize("max_decodes", [1, 63, 64, 65, 200, 256, 300, 384, 385, 512, 1024])
@pytest.mark.parametrize("max_tokens", [100, 500, 2048, 4096])
def test_no_graph_has_room_for_more_decodes_than_tokens(max_decodes: int, max_tokens: int) -> None:
    """The kernels of decodes read a query for each, also where one is missing."""
    of_cpu = cpu_graph_keys(max_decodes, max_tokens, sys.maxsize)
    for keys in (gpu_graph_keys(max_decodes, max_tokens), of_cpu):
        with_prompts = keys[GraphKind.WITH_PROMPTS]
        assert all(key.num_decodes <= key.num_tokens <= max_tokens for key in with_prompts)
        assert {key.num_decodes for key in with_prompts} <= {*range(max_decodes + 1)}
