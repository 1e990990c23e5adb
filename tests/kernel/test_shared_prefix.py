"""Attention of groups of queries to the pages that their contexts begin with, and its plan.

On a CPU the kernels run in Triton's interpreter.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, X a selection out of
# another dimension, Z entries of a flat list.

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.kernel import attend_decode_reference

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.kernel import gpu
from minisgl.kernel.gpu import shared_prefix
from tests.kernel.harness import DEVICE, DOT_DTYPES, numbers, same

ROWS = 64  # of a program
BLOCK = 64  # positions that a program reads at a time


def planned(
    sizes: list[int], shared: list[int], heads: int, num_kv_heads: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The programs and the places of a plan for groups of these sizes, one query after the other.

    Row 1000 + b of the page table is that of query b. Three queries are in no group.
    """
    num_queries = sum(sizes) + 3
    member_B = torch.arange(num_queries, device=DEVICE).int()
    num_shared_B = torch.zeros_like(member_B)
    for group, num_tokens in zip(member_B.split([*sizes, 3]), shared, strict=False):
        num_shared_B[group] = num_tokens
    indptr = torch.tensor([0, *itertools.accumulate(sizes)], device=DEVICE).int()
    plan = gpu.plan_shared_prefixes(
        member_B + 1000, num_shared_B, member_B, indptr, heads * num_kv_heads, num_kv_heads
    )
    program_ZX, place_BX = (numbers.tolist() for numbers in plan)
    return [program[:6] for program in program_ZX], [place[:3] for place in place_BX[:-3]]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3000)), max_size=12),
    heads=st.integers(1, 8),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
)
def test_each_row_of_a_group_attends_to_each_shared_token_once(
    groups: list[tuple[int, int]], heads: int, num_kv_heads: int
) -> None:
    """What a query is told of its places is what the programs write there."""
    sizes = [size for size, _ in groups]
    programs, places = planned(sizes, [tokens for _, tokens in groups], heads, num_kv_heads)
    tokens_at: dict[int, tuple[int, int]] = {}
    owner_at: dict[int, tuple[int, int]] = {}
    for index, (begin, end, row, first_member, first_row, num_rows) in enumerate(programs):
        if begin == end:
            continue
        assert row == 1000 + first_member
        for x in range(min(num_rows, ROWS)):
            query, head = divmod(first_row + x, heads)
            tokens_at[index * ROWS + x] = (begin, end)
            owner_at[index * ROWS + x] = (first_member + query, head)
    num_tokens_of = [tokens for size, tokens in groups for _ in range(size)]
    for b, ((first, step, num), num_tokens) in enumerate(zip(places, num_tokens_of, strict=True)):
        for head in range(heads):
            found_at = [first + part * step + head for part in range(num)]
            assert {owner_at[place] for place in found_at} == {(b, head)}
            bounds = [tokens_at[place] for place in found_at]
            ends = [end for _, end in bounds]
            assert [begin for begin, _ in bounds] == [0, *ends[:-1]]
            assert ends[-1] == num_tokens
    num_places = sum(num for _, _, num in places)
    assert len(owner_at) == num_places * heads, "and nobody else writes"


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9000)), min_size=1, max_size=12),
    heads=st.integers(1, 8),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
)
def test_parts_are_as_short_as_lets_all_programs_run_at_once(
    groups: list[tuple[int, int]], heads: int, num_kv_heads: int
) -> None:
    programs, places = planned(*map(list, zip(*groups, strict=True)), heads, num_kv_heads)
    tiles = [-(-size * heads // ROWS) for size, _ in groups]

    def num_needed(size: int) -> int:
        parts = (-(-tokens // size) for _, tokens in groups)
        return sum(num * count for num, count in zip(tiles, parts, strict=True))

    longest = max(tokens for _, tokens in groups)
    candidates = [size for size in range(256, 9000 + BLOCK, BLOCK) if longest <= 16 * size]
    at_once = (size for size in candidates if num_needed(size) <= 264 // num_kv_heads)
    expected = next(at_once, longest)
    numbers_of_parts = [num for _, _, num in places]
    expected_parts = [-(-tokens // expected) for size, tokens in groups for _ in range(size)]
    assert numbers_of_parts == expected_parts
    lengths = Counter(end - begin for begin, end, *_ in programs if begin < end)
    assert sum(lengths.values()) == num_needed(expected)


@pytest.mark.parametrize(
    ("num_at_once", "num_parts"), [(1, 1), (7, 1), (8, 2), (15, 3), (16, 4), (1000, 16)]
)
def test_a_prefix_has_as_many_parts_as_run_at_once(
    num_at_once: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes a program for 64 of 80 rows of a kv head, and one for the others."""
    monkeypatch.setattr(shared_prefix, "_PROGRAMS", num_at_once)
    _, places = planned([40], [64 * 64], heads=2, num_kv_heads=2)
    assert {num for *_, num in places} == {num_parts}


def test_programs_without_work_have_none_beside_the_longest_context_either() -> None:
    """Their numbers times the length of parts are beyond 32 bits."""
    longest = (1 << 24) - BLOCK
    programs, places = planned([4096], [longest], heads=2, num_kv_heads=1)
    assert {tuple(place[1:]) for place in places} == {(4096 * 2, 2)}
    with_work = programs[:256]
    without = programs[256:]
    assert {(begin, end) for begin, end, *_ in with_work} == {
        (0, longest // 2 + BLOCK // 2),
        (longest // 2 + BLOCK // 2, longest),
    }
    assert without
    assert {(begin, end) for begin, end, *_ in without} == {(0, 0)}
    assert all(num_rows <= 0 for *_, num_rows in without)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("min_part", [64, 256])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize(
    ("sizes", "shared"),
    [
        ([1], [92]),
        ([5], [4]),
        ([24], [64]),
        ([], []),
        ([0, 0], [0, 0]),
        ([7, 10, 6], [92, 4, 64]),
        ([11, 0, 13, 0], [64, 0, 92, 0]),
        ([0] * 70 + [5, 6], [0] * 70 + [64, 92]),
        ([1] * 16 + [0], [4 * n for n in range(1, 17)] + [0]),
    ],
    ids=str,
)
def test_queries_attend_to_the_pages_that_their_group_shares(
    random: torch.Generator,
    sizes: list[int],
    shared: list[int],
    heads: int,
    min_part: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members of a group are anywhere among the queries, and some are in no group."""
    monkeypatch.setattr(shared_prefix, "_MIN_PART", min_part)
    page_size = 4
    num_kv_heads = 2
    pool = numbers(random, 2, 4000, num_kv_heads, 32, dtype=dtype)
    pages = torch.randperm(1000, generator=random, device=DEVICE).int().view(40, 25)
    row = torch.randperm(40, generator=random, device=DEVICE)[:24].int()
    member = torch.randperm(24, generator=random, device=DEVICE).int()
    indptr = torch.tensor([0, *itertools.accumulate(sizes)], device=DEVICE).int()
    num_shared = torch.zeros_like(member)
    for group, num_tokens in zip(member.split([*sizes, 24 - sum(sizes)]), shared, strict=False):
        num_shared[group] = num_tokens
        if len(group):
            rows = row[group].long()[:, None]
            num_pages = num_tokens // page_size
            pages[rows, :num_pages] = pages[rows[:1], :num_pages]

    num_heads = heads * num_kv_heads
    program, place = gpu.plan_shared_prefixes(
        row, num_shared, member, indptr, num_heads, num_kv_heads
    )
    q = numbers(random, 24, num_heads, 32, dtype=dtype)
    context = (*pool.unflatten(1, (-1, page_size)), pages)
    found = gpu.attend_shared_prefixes(q, *context, member, program, scale=0.2)
    expected = torch.zeros_like(q)
    token = torch.arange(24, dtype=torch.int32, device=DEVICE)
    attend_decode_reference(q, *context, token, row, num_shared - 1, expected, scale=0.2)
    for b in num_shared.nonzero().flatten().tolist():
        first, step, num, _ = place[b].tolist()
        place_XN = first + step * torch.arange(num)[:, None] + torch.arange(heads)
        same(joined(place_XN.to(DEVICE), *found).to(dtype), expected[b])


def joined(place_XN: Tensor, output: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """The output of all heads of a query, from the parts at these places of each kv head."""
    top_KXN = top[:, place_XN]
    weight_KXN = torch.exp(top_KXN - top_KXN.amax(dim=1, keepdim=True))
    sum_KN = (weight_KXN * total[:, place_XN]).sum(dim=1)
    output_KNH = (weight_KXN[..., None] * output[:, place_XN]).sum(dim=1)
    return (output_KNH / sum_KN[..., None]).flatten(0, 1)
