"""Decodes in ranges of equal length, or in clusters: CUDA on a GPU, or the source for a CPU."""

# Dimensions: B requests of a step, H head width, K kv heads, L positions of a sequence,
# N query heads, P pages, Q positions of a page, R rows of the tables, S kv slots, Z entries of a
# flat list.

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.kernel import (
    BalancedDecode,
    GroupTensors,
    PrefixParts,
    attend_decode_reference,
    decode_attention,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS = 48
PADDING_PAGE = 0
UNTOUCHED = 77.0
TILE = 16
LEAST_TILES = 2
TOLERANCE = {"atol": 6e-3, "rtol": 6e-3}  # weights and results have 8 bits
MIXED = [1, 15, 16, 17, 300, 31, 2, 33, 160, 32]
LENGTHS = [[1], [16], [17], [700], [1] * 40, MIXED, [1, 600, 1, 1], [48] * 12, [33] * NUM_ROWS]
NUM_RANGES = [1, 3, 132]
# Clusters of all sizes, by the number of kv heads: of one request 16 blocks for 2 heads, 1 for 128.
NUM_KV_HEADS = [2, 8, 16, 32, 128]
both_ways = pytest.mark.parametrize("in_clusters", [False, True], ids=["ranges", "clusters"])


class Step:
    """Decodes of these lengths; slots of the pool that are in none of their contexts hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        group: int = 3,
        num_kv_heads: int = 2,
        width: int = 64,
        page_size: int = 16,
    ) -> None:
        random = torch.Generator(DEVICE).manual_seed(len(lengths))

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=DEVICE).bfloat16()

        def shuffled(num: int) -> Tensor:
            return torch.randperm(num, generator=random, device=DEVICE).int()

        num_heads = group * num_kv_heads
        num_pages_B = [-(-length // page_size) for length in lengths]
        self.page_size = page_size
        self.shape = (num_heads, num_kv_heads, width)
        self.scale = 0.9 / math.sqrt(width)
        self.row_B = shuffled(NUM_ROWS)[: len(lengths)]
        self.position_B = torch.tensor(lengths, device=DEVICE).int() - 1
        self.pages_RP = torch.full(
            (NUM_ROWS, max(num_pages_B) + 1), PADDING_PAGE, dtype=torch.int32, device=DEVICE
        )
        pages_Z = 1 + shuffled(sum(num_pages_B) + 3)
        size = (int(pages_Z.max()) + 1) * page_size
        self.k_SKH, self.v_SKH = torch.full(
            (2, size, num_kv_heads, width), torch.nan, device=DEVICE
        ).bfloat16()
        self.slots_B = []
        for row, length, pages in zip(
            self.row_B.tolist(), lengths, pages_Z.split([*num_pages_B, 3]), strict=False
        ):
            self.pages_RP[row, : len(pages)] = pages
            slots = pages.long()[:, None] * page_size + torch.arange(page_size, device=DEVICE)
            self.slots_B.append(slots.flatten()[:length])
        slot_Z = torch.cat(self.slots_B)
        self.k_SKH[slot_Z], self.v_SKH[slot_Z] = numbers(2, len(slot_Z), num_kv_heads, width)
        self.qkv_BNH = 3 * numbers(len(lengths), num_heads + 2 * num_kv_heads, width)
        self.q_BNH = self.qkv_BNH[:, :num_heads]

    @property
    def pages(self) -> list[Tensor]:
        """k_PQKH and v_PQKH."""
        return [x_SKH.unflatten(0, (-1, self.page_size)) for x_SKH in (self.k_SKH, self.v_SKH)]

    def decode(self, kernels: Any, num_ranges: int, *, in_clusters: bool = False) -> BalancedDecode:
        """Make a decode and plan this step."""
        balanced = BalancedDecode(kernels, self.pages_RP, self.page_size, self.shape, num_ranges)
        balanced.plan(self.row_B, self.position_B, in_clusters=in_clusters)
        return balanced

    def attend(
        self,
        balanced: BalancedDecode,
        *,
        in_clusters: bool = False,
        prefix: PrefixParts | None = None,
    ) -> Tensor:
        """Attend in the middle of a tensor, and check that nothing else of it is written."""
        num_heads, _, width = self.shape
        o_BNH = torch.full(
            (len(self.row_B) + 1, num_heads + 1, width), UNTOUCHED, device=DEVICE
        ).bfloat16()
        balanced.attend(
            self.q_BNH,
            *self.pages,
            o_BNH[:-1, :-1],
            self.scale,
            in_clusters=in_clusters,
            starts_early=True,
            prefix=prefix,
        )
        assert (o_BNH[-1] == UNTOUCHED).all()
        assert (o_BNH[:, -1] == UNTOUCHED).all()
        assert not balanced._num_done.any()
        return o_BNH[:-1, :-1]

    def reference(self) -> Tensor:
        o_BNH = torch.full(self.q_BNH.shape, UNTOUCHED, device=DEVICE)
        query_B = torch.arange(len(self.row_B), device=DEVICE)
        attend_decode_reference(
            self.q_BNH, *self.pages, self.pages_RP,
            query_B, self.row_B, self.position_B, o_BNH, scale=self.scale,
        )  # fmt: skip
        return o_BNH


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, **TOLERANCE)


@pytest.fixture
def blocks(cuda_kernels: Any) -> Iterator[Any]:
    """A function that sets in which order blocks run, and how many at once."""
    if DEVICE.type == "cuda":
        pytest.skip("a GPU chooses itself")
    yield cuda_kernels.set_blocks
    cuda_kernels.set_blocks(0, 1)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("page_size", [16, 64, 48])
@both_ways
def test_every_shape(
    cuda_kernels: Any, in_clusters: bool, page_size: int, width: int, group: int
) -> None:
    step = Step([1, 17, 100, 16, 49], group=group, width=width, page_size=page_size)
    balanced = step.decode(cuda_kernels, 4, in_clusters=in_clusters)
    same(step.attend(balanced, in_clusters=in_clusters), step.reference())


@pytest.mark.parametrize("num_kv_heads", NUM_KV_HEADS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1, 16, 130, 1000])
def test_clusters_of_every_size(
    cuda_kernels: Any, length: int, width: int, num_kv_heads: int
) -> None:
    step = Step([length], group=2, num_kv_heads=num_kv_heads, width=width)
    balanced = step.decode(cuda_kernels, 1, in_clusters=True)
    same(step.attend(balanced, in_clusters=True), step.reference())


@pytest.mark.parametrize(
    ("lengths", "suits"),
    [
        ([16 * 16 * 8 * 24], True),
        ([16 * 16 * 8 * 24 + 1], False),
        ([512, 1, 1, 1], True),
        ([1000, 480], True),
        ([2000, 300, 1], False),
        ([2000] + [100] * 7, False),
    ],
)
def test_uneven_or_long_contexts_are_cut_into_ranges(
    cuda_kernels: Any, lengths: list[int], suits: bool
) -> None:
    step = Step(lengths)
    balanced = step.decode(cuda_kernels, 1, in_clusters=True)
    same(step.attend(balanced, in_clusters=True), step.reference())
    assert bool(balanced._plan[2]) == suits
    assert bool(balanced._split_outputs.any()) == (not suits)


@pytest.mark.parametrize("num_ranges", NUM_RANGES)
@pytest.mark.parametrize(
    "lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}"
)
def test_contexts_are_cut_anywhere(cuda_kernels: Any, lengths: list[int], num_ranges: int) -> None:
    step = Step(lengths)
    balanced = step.decode(cuda_kernels, num_ranges)
    o_BNH = step.attend(balanced)
    same(o_BNH, step.reference())
    assert torch.equal(step.attend(balanced), o_BNH)


@pytest.mark.parametrize(
    "lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}"
)
def test_clusters_take_any_contexts(cuda_kernels: Any, lengths: list[int]) -> None:
    step = Step(lengths)
    balanced = step.decode(cuda_kernels, 1, in_clusters=True)
    o_BNH = step.attend(balanced, in_clusters=True)
    same(o_BNH, step.reference())
    assert torch.equal(step.attend(balanced, in_clusters=True), o_BNH)


def test_a_plan_takes_the_place_of_the_one_before(cuda_kernels: Any) -> None:
    step = Step(MIXED)
    balanced = step.decode(cuda_kernels, 5)
    o_BNH = step.attend(balanced)
    for num in (1, len(MIXED)):
        for in_clusters in (True, False):
            q_BNH = step.q_BNH
            balanced.plan(step.row_B[:num], step.position_B[:num], in_clusters=in_clusters)
            balanced.attend(
                q_BNH[:num],
                *step.pages,
                torch.empty_like(q_BNH[:num]),
                step.scale,
                in_clusters=in_clusters,
                starts_early=True,
            )
    assert torch.equal(step.attend(balanced), o_BNH)


@both_ways
def test_heads_may_lie_apart(cuda_kernels: Any, in_clusters: bool) -> None:
    step = Step(MIXED)
    step.k_SKH, step.v_SKH = (
        x_SKH.transpose(0, 1).contiguous().transpose(0, 1) for x_SKH in (step.k_SKH, step.v_SKH)
    )
    balanced = step.decode(cuda_kernels, 5, in_clusters=in_clusters)
    same(step.attend(balanced, in_clusters=in_clusters), step.reference())


@pytest.mark.parametrize("sign", [1, -1])
@both_ways
def test_scores_may_be_large(cuda_kernels: Any, in_clusters: bool, sign: int) -> None:
    """All have one sign and grow or shrink along the context, so earlier weights nearly vanish."""
    step = Step([500, 140])
    step.q_BNH.abs_()
    for slots in step.slots_B:
        growth = torch.arange(1, 1 + len(slots), device=DEVICE)[:, None, None] / 10
        step.k_SKH[slots] = (sign * step.k_SKH[slots].abs() * growth).bfloat16()
    balanced = step.decode(cuda_kernels, 7, in_clusters=in_clusters)
    same(step.attend(balanced, in_clusters=in_clusters), step.reference())


lengths_and_ranges = {
    "lengths": st.lists(st.integers(1, 130), min_size=1, max_size=12),
    "num_ranges": st.integers(1, 20),
    "in_clusters": st.booleans(),
}


@settings(max_examples=30, deadline=None)
@given(**lengths_and_ranges)
def test_each_token_counts_once(
    cuda_kernels: Any, lengths: list[int], num_ranges: int, in_clusters: bool
) -> None:
    """Queries of zero weigh all tokens alike; a value has a one in the dimension of its tile."""
    step = Step(lengths, num_kv_heads=1, group=2)
    step.q_BNH.zero_()
    expected_BNH = torch.zeros(step.q_BNH.shape, device=DEVICE)
    for b, (length, slots) in enumerate(zip(lengths, step.slots_B, strict=True)):
        tile_L = torch.arange(length, device=DEVICE) // TILE
        step.v_SKH[slots] = torch.nn.functional.one_hot(tile_L, 64)[:, None].bfloat16()
        expected_BNH[b] = torch.bincount(tile_L, minlength=64) / length
    balanced = step.decode(cuda_kernels, num_ranges, in_clusters=in_clusters)
    same(step.attend(balanced, in_clusters=in_clusters), expected_BNH)


@pytest.mark.parametrize("num_ranges", [1, 3, 20])
@pytest.mark.parametrize(
    "lengths", [[33, 1, 200, 0], [700, 0, 0, 0, 0], [0, 0, 0], [16, 32, 0, 0]], ids=str
)
def test_nothing_is_written_for_missing_queries(
    cuda_kernels: Any, lengths: list[int], num_ranges: int
) -> None:
    step = Step(lengths)
    same(step.attend(step.decode(cuda_kernels, num_ranges)), step.reference())


@settings(max_examples=100, deadline=None)
@given(
    contexts=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(0, 9)), min_size=1, max_size=NUM_ROWS
    ),
    num_ranges=st.integers(1, 300),
    has_groups=st.booleans(),
)
def test_a_plan_has_each_tile_once(
    cuda_kernels: Any, contexts: list[tuple[int, int]], num_ranges: int, has_groups: bool
) -> None:
    """A context is tokens of its own, after pages that it may share."""
    lengths = [length for length, _ in contexts]
    num_pages_B = torch.tensor([num_pages if has_groups else 0 for _, num_pages in contexts]).int()
    num_shared_B = (num_pages_B * 16).to(DEVICE)
    groups = GroupTensors(num_shared_B, num_shared_B, num_shared_B) if has_groups else None
    row_B = torch.randperm(NUM_ROWS)[: len(lengths)].int()
    balanced = BalancedDecode(
        cuda_kernels, torch.zeros(NUM_ROWS, 1, device=DEVICE).int(), 16, (1, 1, 64), num_ranges
    )
    position_B = torch.tensor(lengths, device=DEVICE).int() - 1 + num_shared_B
    balanced.plan(row_B.to(DEVICE), position_B, in_clusters=False, groups=groups)

    plan = balanced._plan.cpu()
    size, num_tiles, suits_clusters, _ = plan[:4].tolist()
    requests = plan[4 : 4 * (1 + len(lengths))].view(-1, 4).tolist()
    starts = plan[4 * (1 + len(lengths)) :][: 8 * num_ranges].view(-1, 8).tolist()
    tiles_B = [-(-length // TILE) for length in lengths]
    assert num_tiles == sum(tiles_B)
    best_of_longest = math.isqrt(max(tiles_B) // 2)
    assert size == max(-(-num_tiles // num_ranges), LEAST_TILES, best_of_longest)
    assert not suits_clusters
    assert [request[1:] for request in requests] == torch.tensor(
        [lengths, row_B.tolist(), num_pages_B.tolist()]
    ).T.tolist()
    line = [(b, tile) for b, num in enumerate(tiles_B) for tile in range(num)]
    assert [line[request[0]] for request in requests] == [(b, 0) for b in range(len(lengths))]
    begun = starts[: -(-num_tiles // size)]
    assert [(b, tile) for b, tile, *_ in begun] == line[::size]
    assert [start[4:] for start in begun] == [requests[b] for b, *_ in begun]


def test_a_plan_of_more_requests_than_threads(cuda_kernels: Any) -> None:
    num_requests = 2500
    tiles_B = torch.arange(num_requests) % 7 + 1
    balanced = BalancedDecode(
        cuda_kernels, torch.zeros(num_requests, 1, device=DEVICE).int(), 16, (1, 1, 64), 33
    )
    row_B = torch.arange(num_requests, device=DEVICE).int()
    balanced.plan(row_B, (tiles_B * TILE - 1).to(DEVICE).int(), in_clusters=False)
    plan = balanced._plan.cpu()
    first_B = tiles_B.cumsum(0) - tiles_B
    size, num_tiles = plan[:2].tolist()
    assert num_tiles == tiles_B.sum()
    requests = plan[4 : 4 * (1 + num_requests)].view(-1, 4)
    assert torch.equal(requests[:, 0], first_B.int())
    starts = plan[4 * (1 + num_requests) :][: 8 * 33].view(-1, 8).tolist()
    for i, (b, begin, *_) in enumerate(starts):
        assert first_B[b] + begin == i * size
        assert begin < tiles_B[b]


@pytest.mark.parametrize("seed", range(1, 33))
def test_a_plan_knows_the_longest_context_whichever_thread_is_late(
    cuda_kernels: Any, blocks: Any, seed: int
) -> None:
    """Another warp than the one that begins with a longest of 0 has it."""
    lengths = torch.ones(NUM_ROWS).int()
    lengths[-1] = 3000
    row_B = torch.arange(NUM_ROWS).int()
    balanced = BalancedDecode(cuda_kernels, torch.zeros(NUM_ROWS, 1).int(), 16, (1, 1, 64), 300)
    blocks(seed, 1)
    balanced.plan(row_B, lengths - 1, in_clusters=False)
    assert balanced._plan[0] == math.isqrt(-(-3000 // TILE) // 2)


@pytest.mark.parametrize("num_together", [1, 100])
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize(
    "lengths",
    [[100, 5, 90, 161, 40], [64] * 12, [1500, 1, 90]],
    ids=["cut anywhere", "cut into halves", "uneven"],
)
@both_ways
def test_any_block_may_be_the_last(
    cuda_kernels: Any,
    blocks: Any,
    in_clusters: bool,
    lengths: list[int],
    seed: int,
    num_together: int,
) -> None:
    step = Step(lengths, num_kv_heads=4)
    balanced = step.decode(cuda_kernels, 24, in_clusters=in_clusters)
    o_BNH = step.attend(balanced, in_clusters=in_clusters)
    same(o_BNH, step.reference())
    for splits in (balanced._split_outputs, balanced._split_stats):
        splits.fill_(torch.nan)  # else those of the first time would do
    blocks(seed, num_together)
    assert torch.equal(step.attend(balanced, in_clusters=in_clusters), o_BNH)


@pytest.mark.parametrize("num_ranges", [1, 4, 50])
@pytest.mark.parametrize("lengths", [MIXED, [100, 33, 128, 1]], ids=["uneven", "even"])
@both_ways
def test_queries_and_last_tokens_may_come_late(
    cuda_kernels: Any, blocks: Any, in_clusters: bool, lengths: list[int], num_ranges: int
) -> None:
    """The kernel before may still be writing them when this one starts."""
    step = Step(lengths)
    expected_BNH = step.reference()
    balanced = step.decode(cuda_kernels, num_ranges, in_clusters=in_clusters)
    late = [step.qkv_BNH]
    for slots in step.slots_B:
        # Another request of the step may compute the token before the last one.
        for slot in slots[-2:]:
            late += [step.k_SKH[slot], step.v_SKH[slot]]
    try:
        for place in late:
            value = place.clone()
            cuda_kernels.arrives_late(place.fill_(torch.nan), value)
        same(step.attend(balanced, in_clusters=in_clusters), expected_BNH)
    finally:
        cuda_kernels.forget_late()


class SharingStep(Step):
    """Decodes, and what they have found in the first pages of their contexts.

    Which of them share these pages, that kernel need not know.
    """

    def __init__(
        self, lengths: list[int], shared: list[int], num_parts: int, *, size: int = 1, **shape: int
    ) -> None:
        """
        Args:
            shared: the tokens in these pages, of each context; 0 for one in no group.
            size: of scores, as a factor.
        """
        super().__init__(lengths, **shape)
        self.qkv_BNH.mul_(size)
        num_shared_B = torch.tensor(shared, device=DEVICE).int()
        self.groups = GroupTensors(num_shared_B, *(torch.empty(0).int() for _ in range(2)))
        found = [self._found(b, num_parts) for b in range(len(lengths))]
        found_BNX = (torch.stack(x) for x in zip(*found, strict=True))
        output_KZH, top_KZ, sum_KZ = (self._by_place(x_BNX) for x_BNX in found_BNX)
        group = self.shape[0] // self.shape[1]
        first_B = group * torch.arange(len(lengths), device=DEVICE).flip(0)
        step_B = torch.full_like(first_B, group * len(lengths))
        num_B = torch.where(num_shared_B > 0, num_parts, 99)  # not written in no group
        place_BX = torch.stack([first_B, step_B, num_B, num_B], dim=1).int()
        self.prefix = PrefixParts(output_KZH, top_KZ, sum_KZ, place_BX)

    def _by_place(self, found_BNX: Tensor) -> Tensor:
        """For each kv head part after part, each with all queries, of which the last lies first."""
        found_BKGX = found_BNX.flip(0).unflatten(1, (self.shape[1], -1))
        return found_BKGX.movedim((1, 3, 0, 2), (0, 1, 2, 3)).flatten(1, 3).contiguous()

    def _found(self, b: int, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a query has found in each of its parts, and after them no numbers."""
        slots = self.slots_B[b][: int(self.groups.num_shared_B[b])]
        parts = [self._found_in(b, part) for part in slots.tensor_split(num_parts)]
        unused = [torch.full_like(x, torch.nan) for x in parts[0]]
        output_NXH, top_NX, sum_NX = (
            torch.stack(x, dim=1) for x in zip(*parts, unused, strict=True)
        )
        return output_NXH, top_NX, sum_NX

    def _found_in(self, b: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, _ = self.shape
        k_LNH, v_LNH = (
            x_SKH[slots].float().repeat_interleave(num_heads // num_kv_heads, dim=1)
            for x_SKH in (self.k_SKH, self.v_SKH)
        )
        score_NL = torch.einsum("nh,lnh->nl", self.q_BNH[b].float(), k_LNH) * self.scale
        nothing_N1 = torch.full((len(score_NL), 1), -1e30, device=DEVICE)
        top_N = torch.cat([score_NL, nothing_N1], dim=1).amax(dim=1)
        weight_NL = torch.exp(score_NL - top_N[:, None])
        return torch.einsum("nl,lnh->nh", weight_NL, v_LNH), top_N, weight_NL.sum(dim=1)

    def decode(self, kernels: Any, num_ranges: int, *, in_clusters: bool = False) -> BalancedDecode:
        balanced = BalancedDecode(kernels, self.pages_RP, self.page_size, self.shape, num_ranges)
        balanced.plan(
            self.row_B,
            self.position_B,
            in_clusters=in_clusters,
            groups=self.groups,
        )
        return balanced


@pytest.mark.parametrize("num_ranges", [1, 4, 50])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("num_shared", [0, 96, 192])
@pytest.mark.parametrize(
    "shape",
    [{}, {"page_size": 48}, {"width": 128, "group": 8}, {"num_kv_heads": 5, "group": 1}],
    ids=str,
)
def test_contexts_may_go_on_from_what_they_share(
    cuda_kernels: Any, shape: dict[str, int], num_shared: int, num_parts: int, num_ranges: int
) -> None:
    """Every third is in no group, and groups share unequally much."""
    shared = [num_shared * (b % 3) // 2 // 48 * 48 for b in range(len(MIXED))]
    lengths = [length + num for length, num in zip(MIXED, shared, strict=True)]
    step = SharingStep(lengths, shared, num_parts, **shape)
    balanced = step.decode(cuda_kernels, num_ranges)
    same(step.attend(balanced, prefix=step.prefix), step.reference())


@pytest.mark.parametrize("num_parts", [2, 5])
def test_scores_may_be_large_in_a_part_of_what_contexts_share(
    cuda_kernels: Any, num_parts: int
) -> None:
    step = SharingStep([300, 150, 200], [144, 144, 0], num_parts, size=200)
    same(step.attend(step.decode(cuda_kernels, 3), prefix=step.prefix), step.reference())


def test_padding_is_written_beside_contexts_with_a_shared_prefix(cuda_kernels: Any) -> None:
    """It has a token in the padding page, and a number that is none would come from there."""
    step = SharingStep([100, 80, 1, 1], [64, 64, 0, 0], 2)
    step.k_SKH[:16] = step.v_SKH[:16] = 0
    o_BNH = step.attend(step.decode(cuda_kernels, 3), prefix=step.prefix)
    same(o_BNH[:2], step.reference()[:2])
    assert o_BNH.isfinite().all()
    assert (o_BNH[2:] != UNTOUCHED).all()


def test_what_is_found_in_a_shared_prefix_may_come_late(cuda_kernels: Any, blocks: Any) -> None:
    step = SharingStep([300, 70, 65], [64, 64, 64], 2)
    balanced = step.decode(cuda_kernels, 4)
    try:
        for found in step.prefix[:3]:
            value = found.clone()
            cuda_kernels.arrives_late(found.fill_(torch.nan), value)
        same(step.attend(balanced, prefix=step.prefix), step.reference())
    finally:
        cuda_kernels.forget_late()


PROCESSORS = SimpleNamespace(multi_processor_count=132)


@pytest.mark.parametrize(
    ("shape", "page_size", "fits"),
    [
        ((16, 8, 128), 64, True),
        ((8, 1, 64), 16, True),
        ((1, 1, 64), 48, True),
        ((9, 1, 64), 16, False),
        ((24, 2, 128), 16, False),
        ((16, 8, 80), 16, False),
        ((16, 8, 256), 16, False),
        ((16, 8, 128), 8, False),
        ((16, 8, 128), 24, False),
        ((16, 8, 128), 1, False),
    ],
)
def test_only_what_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], page_size: int, fits: bool
) -> None:
    monkeypatch.setattr(decode_attention, "cuda_kernels_for", lambda x: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROCESSORS)
    balanced = BalancedDecode.create_if_supported(
        torch.zeros(2, 3, dtype=torch.int32), page_size, shape, torch.bfloat16
    )
    assert (balanced is not None) == fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_not_taken(dtype: torch.dtype) -> None:
    table_RP = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    assert BalancedDecode.create_if_supported(table_RP, 16, (16, 8, 128), dtype) is None


def test_a_cpu_has_none() -> None:
    assert (
        BalancedDecode.create_if_supported(
            torch.zeros(2, 3, dtype=torch.int32), 16, (16, 8, 128), torch.bfloat16
        )
        is None
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")
@pytest.mark.parametrize("width", [64, 128])
@both_ways
def test_a_graph_follows_the_lengths(cuda_kernels: Any, in_clusters: bool, width: int) -> None:
    """As many ranges as the device has room for; plans and layers replayed, while contexts grow."""
    step = Step(
        [137 * i % 925 + 140 for i in range(NUM_ROWS)],
        num_kv_heads=8,
        group=2,
        width=width,
        page_size=64,
    )
    balanced = BalancedDecode.create_if_supported(step.pages_RP, 64, step.shape, torch.bfloat16)
    assert balanced
    assert balanced.can_use_clusters(16)
    assert not balanced.can_use_clusters(17)
    end_B = step.position_B.clone()
    o_2BNH = torch.empty(2, *step.q_BNH.shape, device=DEVICE).bfloat16()
    num = NUM_ROWS if not in_clusters else 128 // 8
    tokens = slice(num)

    def call() -> None:
        balanced.plan(step.row_B[tokens], step.position_B[tokens], in_clusters=in_clusters)
        for o_BNH in o_2BNH:
            balanced.attend(
                step.q_BNH[tokens],
                *step.pages,
                o_BNH[tokens],
                step.scale,
                in_clusters=in_clusters,
                starts_early=True,
            )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for missing in (139, 60, 1, 0):
        step.position_B.copy_(end_B - missing)
        graph.replay()
        same(o_2BNH[0][tokens], step.reference()[tokens])
        assert torch.equal(o_2BNH[0][tokens], o_2BNH[1][tokens])
