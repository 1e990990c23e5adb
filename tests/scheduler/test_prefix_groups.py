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
from minisgl.scheduler import prefix_groups
from minisgl.scheduler.decode import RunningPlan
from minisgl.scheduler.prefix_groups import group_by_prefix
from minisgl.scheduler.step_digest import StepDigests
from tests.scheduler.harness import Host, make_limits

Found = list[tuple[int, list[int]]]
BYTES = 4096  # a token's keys and values: 8 heads of 128 bfloat16


def decodes_of(uids: list[int], position: int = 10**4) -> list[ReqSlice]:
    known = np.zeros(1, dtype=np.int32)
    reqs = [Req(uid, known, SamplingParams(), max_length=2, seed=0) for uid in uids]
    return [ReqSlice(req, position, position + 1, samples=True) for req in reqs]


def groups_of(prefixes: list[SharedPrefix], uids: list[int]) -> list[PrefixGroup]:
    """The groups where any sharing pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_groups, "_LEAST_BYTES", 0)
        patch.setattr(prefix_groups, "_PART_OF_OWN", 0)
        return group_by_prefix(decodes_of(uids), prefixes, BYTES)


def grouped(prefixes: list[SharedPrefix], uids: list[int]) -> Found:
    return [(group.num_tokens, group.members) for group in groups_of(prefixes, uids)]


def test_decodes_are_named_by_their_indices() -> None:
    shared = SharedPrefix(320, set(range(100, 140)), None)
    uids = [*range(50, 60), *range(139, 99, -1)]
    assert grouped([shared], uids) == [(320, list(range(10, 50)))]


def test_who_shares_with_too_few_decodes_is_in_no_group() -> None:
    """Others have locked the prefix, too, but are not decoded in this step."""
    shared = SharedPrefix(320, set(range(40)), None)
    assert grouped([shared], list(range(FEWEST_IN_GROUP - 1))) == []
    assert grouped([shared], list(range(FEWEST_IN_GROUP))) == [(320, list(range(8)))]


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
        (352, 7, [(1352, 20)]),
        (336, 7, [(1000, 27)]),
        (50, 8, [(1050, 20), (1000, 8)]),
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
    ("shared", "num_own", "kv_bytes", "pays"),
    [
        ([(512, 48)], 300, BYTES, False),
        ([(512, 64)], 300, BYTES, False),
        ([(512, 128)], 300, BYTES, True),
        ([(1024, 32)], 300, BYTES, True),
        ([(1024, 32)], 512, BYTES, True),  # the bound itself
        ([(1024, 32)], 513, BYTES, False),
        ([(1024, 32)], 1500, BYTES, False),
        ([(2048, 32)], 1500, BYTES, True),
        ([(1024, 24)], 300, BYTES, False),
        ([(1024, 32)], 300, BYTES // 2, False),
        ([(1024, 64)], 300, BYTES // 2, True),
        ([(512, 8)] * 8, 200, BYTES, True),
        ([(512, 8)] * 7, 200, BYTES, False),
        ([(4096, 8)], 200, BYTES, True),
        ([(2048, 8)], 200, BYTES, False),
    ],
)
def test_groups_are_made_where_much_would_be_read_again(
    shared: list[tuple[int, int]], num_own: int, kv_bytes: int, pays: bool
) -> None:
    prefixes: list[SharedPrefix] = []
    decodes: list[ReqSlice] = []
    for num_tokens, num in shared:
        uids = list(range(len(decodes), len(decodes) + num))
        prefixes.append(SharedPrefix(num_tokens, set(uids), None))
        decodes += decodes_of(uids, num_tokens + num_own - 1)
    assert bool(group_by_prefix(decodes, prefixes, kv_bytes)) == pays


def test_who_shares_nothing_counts_as_what_is_read_in_any_case() -> None:
    shared = SharedPrefix(1024, set(range(40)), None)
    decodes = decodes_of(list(range(40)), 1200)
    others = decodes_of(list(range(40, 80)), 5000)
    assert group_by_prefix(decodes, [shared], BYTES)
    assert not group_by_prefix([*decodes, *others], [shared], BYTES)


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


@pytest.mark.parametrize(
    ("kv_bytes", "num_grouped"), [(0, 0), (2**50, 3 * 20 + 16 + 12 + 8)], ids=["none", "all"]
)
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
    groups = groups_of(prefixes, uids)

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
    enough = (group for group in alone if len(group.members) >= FEWEST_IN_GROUP)
    most = max(map(reads, enough), default=0)
    assert sum(map(reads, groups)) >= most


def reads(group: PrefixGroup) -> int:
    return group.num_tokens * len(group.members)
