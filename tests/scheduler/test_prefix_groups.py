"""Which decodes attend to a prefix together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import (
    FEWEST_IN_GROUP,
    BatchPlan,
    PrefixGroup,
    Req,
    ReqSlice,
    SamplingParams,
)
from minisgl.kvcache import SharedPrefix
from minisgl.scheduler.decode import RunningPlan
from minisgl.scheduler.prefix_groups import group_by_prefix
from minisgl.scheduler.step_digest import StepDigests
from tests.scheduler.harness import Host, make_limits

Found = list[tuple[int, list[int]]]
ANY_PAYS = 2**50  # bytes of a token's keys and values
BYTES = 4096  # those of 8 heads of 128 bfloat16


def decodes_of(uids: list[int]) -> list[ReqSlice]:
    known = np.zeros(1, dtype=np.int32)
    reqs = [Req(uid, known, SamplingParams(), max_length=2, seed=0) for uid in uids]
    return [ReqSlice(req, 10**6, 10**6 + 1, samples=True) for req in reqs]


def grouped(prefixes: list[SharedPrefix], uids: list[int]) -> Found:
    groups = group_by_prefix(decodes_of(uids), prefixes, ANY_PAYS)
    return [(group.num_tokens, group.members) for group in groups]


def test_decodes_are_named_by_their_indices() -> None:
    shared = SharedPrefix(320, set(range(100, 140)), None)
    uids = [*range(50, 60), *range(139, 99, -1)]
    assert grouped([shared], uids) == [(320, list(range(10, 50)))]


def test_who_shares_with_too_few_decodes_is_in_no_group() -> None:
    """Others have locked the prefix, too, but are not decoded in this step."""
    shared = SharedPrefix(320, set(range(40)), None)
    assert grouped([shared], list(range(FEWEST_IN_GROUP - 1))) == []
    assert grouped([shared], list(range(FEWEST_IN_GROUP))) == [(320, list(range(16)))]


def test_one_unrelated_request_does_not_end_sharing() -> None:
    shared = SharedPrefix(320, set(range(40)), None)
    assert grouped([shared], list(range(41))) == [(320, list(range(40)))]


def test_prefixes_of_several_texts_are_groups() -> None:
    prefixes = [
        SharedPrefix(num_tokens, set(range(first, first + 20)), None)
        for num_tokens, first in ((320, 0), (16, 20), (640, 40))
    ]
    assert grouped(prefixes, list(range(70))) == [
        (640, list(range(40, 60))),
        (320, list(range(20))),
        (16, list(range(20, 40))),
    ]


@pytest.mark.parametrize(
    ("num_more", "num_others", "expected"),
    [
        (16, 0, [(1016, 20)]),
        (48, 40, [(1000, 60)]),
        (64, 40, [(1064, 20), (1000, 40)]),
        (16, 4, [(1000, 24)]),
        (200, 4, [(1200, 20)]),
        (752, 15, [(1752, 20)]),
        (736, 15, [(1000, 35)]),
        (50, 16, [(1050, 20), (1000, 16)]),
    ],
)
def test_a_longer_prefix_is_a_group_if_it_saves_more_than_it_costs(
    num_more: int, num_others: int, expected: list[tuple[int, int]]
) -> None:
    """Twenty share more than the others: with them they are a group, or without.

    Left alone, fewer others than a group needs would read the shorter prefix one by one.
    """
    everybody = list(range(20 + num_others))
    above = SharedPrefix(1000, set(everybody), None)
    longer = SharedPrefix(1000 + num_more, set(range(20)), above)
    found = grouped([above, longer], everybody)
    assert [(num_tokens, len(members)) for num_tokens, members in found] == expected


@pytest.mark.parametrize(
    ("shared", "kv_bytes", "pays"),
    [
        ([(512, 48)], BYTES, False),
        ([(8192, 48)], BYTES, True),
        ([(2048, 256)], BYTES, True),
        ([(512, 256)], BYTES, False),
        ([(512, 64), (528, 64), (544, 64), (496, 64)], BYTES, True),
        ([(2048, 64)], BYTES, True),
        ([(2032, 64)], BYTES, False),
        ([(2048, 64)], BYTES // 2, False),
        ([(2048, 128)], BYTES // 2, True),
        ([(8960, 16)], BYTES, True),
    ],
)
def test_groups_are_made_where_much_would_be_read_again(
    shared: list[tuple[int, int]], kv_bytes: int, pays: bool
) -> None:
    prefixes: list[SharedPrefix] = []
    num_uids = 0
    for num_tokens, num in shared:
        prefixes.append(SharedPrefix(num_tokens, set(range(num_uids, num_uids + num)), None))
        num_uids += num
    groups = group_by_prefix(decodes_of(list(range(num_uids))), prefixes, kv_bytes)
    assert bool(groups) == pays


def test_others_are_those_that_no_longer_prefix_has_taken() -> None:
    """Those 16 save too few reads to leave the other 20, which are gone."""
    everybody = list(range(36))
    above = SharedPrefix(1000, set(everybody), None)
    longest = SharedPrefix(5000, set(range(20)), above)
    longer = SharedPrefix(1016, set(range(20, 36)), above)
    assert grouped([above, longest, longer], everybody) == [
        (5000, list(range(20))),
        (1016, list(range(20, 36))),
    ]


@pytest.mark.parametrize(("kv_bytes", "num_grouped"), [(0, 0), (ANY_PAYS, 3 * 20 + 16)])
def test_running_requests_are_grouped_until_too_few_are_left(
    kv_bytes: int, num_grouped: int
) -> None:
    """One with another prompt runs beside them; the executor compares their rows."""
    limits = replace(make_limits(200, 4, 64), kv_bytes=kv_bytes)
    host = Host(limits, num_rows=40)
    prefix = [*range(2, 18), *range(2, 18)]
    for i in range(20):
        host.submit([*prefix, 2 + i], SamplingParams(max_tokens=4 + i // 4, ignore_eos=True))
    host.submit([7, 6, 5], SamplingParams(max_tokens=20, ignore_eos=True))
    host.drain()
    host.check_answers()
    # All are computed four times, once of prompts, and then by fours fewer.
    assert host.executor.num_grouped == num_grouped


def test_ranks_that_group_decodes_differently_are_found_out() -> None:
    decodes = decodes_of(list(range(20)))
    running = RunningPlan(0, decodes)
    digests = {
        StepDigests().next(0, BatchPlan(decodes, prefix_groups=groups), running, 0)
        for groups in ([], [PrefixGroup(32, [*range(16)])], [PrefixGroup(32, [*range(1, 17)])])
    }
    assert len(digests) == 3


@dataclass
class Tree:
    """Prefixes at random; which uids lock each of them."""

    prefixes: list[SharedPrefix] = field(default_factory=list)

    def grow(self, data: st.DataObject, uids: list[int], above: SharedPrefix | None) -> None:
        while len(uids) >= FEWEST_IN_GROUP:
            num = data.draw(st.integers(1, len(uids)))
            part = uids[:num]
            uids = uids[num:]
            if num < FEWEST_IN_GROUP:
                continue
            num_above = above.num_tokens if above else 0
            num_more = 16 * data.draw(st.integers(1, 100))
            prefix = SharedPrefix(num_above + num_more, set(part), above)
            self.prefixes.append(prefix)
            if data.draw(st.booleans()):
                self.grow(data, part[data.draw(st.integers(0, 3)) :], prefix)


@given(data=st.data(), num_uids=st.integers(0, 120))
def test_any_tree_gives_groups_that_save_as_much_as_the_best_prefix_alone(
    data: st.DataObject, num_uids: int
) -> None:
    tree = Tree()
    tree.grow(data, list(range(num_uids)), None)
    uids = data.draw(st.permutations(range(num_uids)))[: data.draw(st.integers(0, num_uids))]
    prefixes = data.draw(st.permutations(tree.prefixes))
    groups = group_by_prefix(decodes_of(uids), prefixes, ANY_PAYS)

    members = [member for group in groups for member in group.members]
    assert len(set(members)) == len(members)
    for group in groups:
        assert len(group.members) >= FEWEST_IN_GROUP
        assert group.members == sorted(group.members)
        assert any(
            prefix.num_tokens == group.num_tokens
            and prefix.locked_by >= {uids[member] for member in group.members}
            for prefix in tree.prefixes
        )
    alone = [
        PrefixGroup(prefix.num_tokens, [i for i, uid in enumerate(uids) if uid in prefix.locked_by])
        for prefix in tree.prefixes
    ]
    most = max((reads(group) for group in alone if len(group.members) >= 16), default=0)
    assert sum(map(reads, groups)) >= most


def reads(group: PrefixGroup) -> int:
    return group.num_tokens * len(group.members)
