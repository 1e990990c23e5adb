"""The Triton kernels of a mixture of experts against the references."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# J pairs of a token and an expert it chose, T tokens of a step, U both halves of a gated mlp: 2 F.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from minisgl.kernel import ExpertTiles, ProductTile, moe_reference, route_reference

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.kernel import dispatch, gpu, route
from minisgl.moe import rule_table
from tests.kernel.harness import DEVICE, DOT_DTYPES, DTYPES, numbers, same

pytestmark = pytest.mark.gpu
FEW = 4  # tokens that are computed by token; the interpreter is too slow for more
# Fewer programs than tiles: a program multiplies several.
TILES = ExpertTiles(16, ProductTile(64, 256, 4, 3, 5), ProductTile(32, 128, 4, 2, 2))
MORE_TILES = [
    TILES,
    ExpertTiles(32, ProductTile(128, 128, 4, 4, 1), ProductTile(64, 512, 4, 3, 1000)),
    ExpertTiles(128, ProductTile(256, 128, 8, 3, 132), ProductTile(128, 128, 8, 4, 132)),
]

TILES_OF_64 = [
    ExpertTiles(64, ProductTile(128, 128, 4, 3, 2), ProductTile(64, 256, 4, 3, 1)),
    ExpertTiles(64, ProductTile(256, 128, 8, 3, 3), ProductTile(256, 128, 8, 4, 2)),
]


def distinct_logits(
    random: torch.Generator, tokens: int, num_experts: int, dtype: torch.dtype
) -> Tensor:
    rank_TE = torch.rand(tokens, num_experts, generator=random, device=DEVICE).argsort(dim=1)
    return (rank_TE / 16).to(dtype)


def routed(
    logits_TE: Tensor, each: int, *, normalize: bool, first: int = 0
) -> tuple[Tensor, Tensor]:
    weight_TA = logits_TE.new_empty(len(logits_TE), each)
    expert_TA = torch.empty_like(weight_TA, dtype=torch.int32)
    gpu.route(logits_TE, weight_TA, expert_TA, normalize, first)
    return weight_TA, expert_TA


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "each"),
    [(0, 5, 2), (1, 1, 1), (3, 5, 5), (9, 5, 3), (4, 128, 8), (2, 60, 6)],
)
def test_tokens_go_to_the_best_experts(
    random: torch.Generator,
    tokens: int,
    num_experts: int,
    each: int,
    normalize: bool,
    dtype: torch.dtype,
) -> None:
    logits_TE = distinct_logits(random, tokens, num_experts, dtype)
    weight_TA, expert_TA = routed(logits_TE, each, normalize=normalize)
    expected_weight_TA, expected_TA = route_reference(logits_TE, each, normalize)
    assert torch.equal(expert_TA, expected_TA)
    same(weight_TA, expected_weight_TA)


@pytest.mark.parametrize("first", [1, 2, 16])
def test_the_numbers_of_chosen_experts_count_from_the_first_that_is_there(
    random: torch.Generator, first: int
) -> None:
    logits_TE = distinct_logits(random, 3, 20, torch.float32)
    weight_TA, number_TA = routed(logits_TE, 4, normalize=True, first=first)
    expected_weight_TA, expected_TA = route_reference(logits_TE, 4, True, first)
    assert torch.equal(number_TA, expected_TA)
    same(weight_TA, expected_weight_TA)


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits_TE = torch.zeros(2, 7, device=DEVICE)
    logits_TE[1, [2, 5, 6]] = 1.0
    assert routed(logits_TE, 3, normalize=True)[1].tolist() == [[0, 1, 2], [2, 5, 6]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_no_numbers_still_choose_experts_that_exist() -> None:
    logits_TE = torch.full((2, 5), torch.nan, device=DEVICE)
    logits_TE[1] = -torch.inf
    expert_TA = routed(logits_TE, 3, normalize=True)[1]
    assert ((expert_TA >= 0) & (expert_TA < 5)).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("tokens", "each", "num_experts"),
    [(1, 1, 1), (9, 3, 6), (700, 3, 7), (40, 8, 128), (300, 2, 150)],
)
def test_blocks_have_the_pairs_of_each_expert_in_order(
    random: torch.Generator,
    tokens: int,
    each: int,
    num_experts: int,
    block_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two experts have none. Many pairs are counted in chunks, of which a table has 16 rows."""
    monkeypatch.setattr(gpu.expert_pairs, "MOST_PAIRS_AT_ONCE", 1024)
    monkeypatch.setattr(gpu.expert_pairs, "_CHUNK_PAIRS", 128)
    expert_TA = torch.randint(
        max(1, num_experts - 2), (tokens, each), generator=random, device=DEVICE
    )
    blocks = gpu.sort_pairs(expert_TA.to(dtype), num_experts, block_size)
    pairs: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        own = (expert_TA.flatten() == expert).nonzero().flatten().tolist()
        pairs += [*own, *[-1] * (-len(own) % block_size)]
        experts += [expert] * -(-len(own) // block_size)
    assert blocks.num_blocks_1.tolist() == [len(experts)]
    assert len(blocks.expert_X) >= len(experts)
    assert blocks.pair_Z[: len(pairs)].tolist() == pairs
    assert blocks.expert_X[: len(experts)].tolist() == experts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("first", [0, 40, 300, -300, 100_000])
@pytest.mark.parametrize("tokens", [9, 700])
def test_blocks_have_no_pairs_of_experts_that_are_not_there(
    random: torch.Generator,
    tokens: int,
    first: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three experts of 300 are there. Many pairs are sorted in chunks."""
    monkeypatch.setattr(gpu.expert_pairs, "MOST_PAIRS_AT_ONCE", 1024)
    monkeypatch.setattr(gpu.expert_pairs, "_CHUNK_PAIRS", 128)
    shape = (tokens, 3)
    expert_TA = torch.randint(300, shape, generator=random, device=DEVICE)
    some = torch.rand(shape, generator=random, device=DEVICE) < 0.2
    expert_TA[some] = torch.randint(40, 43, shape, generator=random, device=DEVICE)[some]
    number_TA = expert_TA - first
    blocks = gpu.sort_pairs(number_TA.to(dtype), 3, 16)
    there = sorted(
        (number, pair)
        for pair, number in enumerate(number_TA.flatten().tolist())
        if number in range(3)
    )
    placed = blocks.pair_Z[: int(blocks.num_blocks_1) * 16].tolist()
    assert [pair for pair in placed if pair >= 0] == [pair for _, pair in there]
    counts = [sum(number == e for number, _ in there) for e in range(3)]
    assert int(blocks.num_blocks_1) == sum(-(-count // 16) for count in counts)


def experts(
    random: torch.Generator, num: int, width: int, mlp_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    gate_up_EUD = numbers(random, num, 2 * mlp_width, width, dtype=dtype) / width**0.5
    return gate_up_EUD, numbers(random, num, width, mlp_width, dtype=dtype) / mlp_width**0.5


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Torch fills what it allocates: with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(
    x_TD: Tensor,
    weights: tuple[Tensor, Tensor],
    weight_TA: Tensor,
    expert_TA: Tensor,
    tiles: ExpertTiles = TILES,
) -> None:
    y_TD = torch.full_like(x_TD, torch.nan)
    with nan_in_new_memory():
        if len(x_TD) <= FEW:
            gpu.moe_by_token(x_TD, *weights, weight_TA, expert_TA, y_TD)
        else:
            gpu.moe_by_expert(x_TD, *weights, weight_TA, expert_TA, y_TD, tiles)
    wide = moe_reference(x_TD.float(), *(w.float() for w in weights), weight_TA.float(), expert_TA)
    same(y_TD, wide.to(x_TD.dtype))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("num_experts", "each", "width", "mlp_width"),
    [(5, 3, 20, 10), (3, 1, 130, 70), (16, 8, 24, 12), (2, 2, 36, 90)],
)
@pytest.mark.parametrize("tokens", [0, 1, FEW, FEW + 1, 7, 40])
def test_experts(
    random: torch.Generator,
    tokens: int,
    num_experts: int,
    each: int,
    width: int,
    mlp_width: int,
    dtype: torch.dtype,
) -> None:
    weights = experts(random, num_experts, width, mlp_width, dtype)
    score_TE = torch.rand(tokens, num_experts, generator=random, device=DEVICE)
    weight_TA, expert_TA = score_TE.topk(each)
    check(
        numbers(random, tokens, width, dtype=dtype), weights, weight_TA.to(dtype), expert_TA.int()
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("tiles", MORE_TILES)
def test_experts_in_tiles(random: torch.Generator, tiles: ExpertTiles, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and DEVICE.type == "cuda" and tiles.pairs == 128:
        pytest.skip("these tiles of float32 are too large for a processor")
    weight_TA, expert_TA = torch.rand(90, 6, generator=random, device=DEVICE).topk(3)
    check(
        numbers(random, 90, 72, dtype=dtype),
        experts(random, 6, 72, 144, dtype),
        weight_TA.to(dtype),
        expert_TA,
        tiles,
    )


def is_aligned(weight_EOI: Tensor) -> bool:
    return weight_EOI.shape[2] * weight_EOI.itemsize % 16 == 0  # all that TMA needs


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("tiles", TILES_OF_64)
@pytest.mark.parametrize(("width", "mlp_width"), [(72, 144), (136, 40)])
def test_experts_whose_tiles_are_copied_by_tma(
    random: torch.Generator,
    width: int,
    mlp_width: int,
    tiles: ExpertTiles,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's interpreter can copy so, too. Tiles go beyond the ends of rows and of experts."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu.expert_products, "_takes_tma", is_aligned)
    weight_TA, expert_TA = torch.rand(90, 6, generator=random, device=DEVICE).topk(3)
    check(
        numbers(random, 90, width, dtype=dtype),
        experts(random, 6, width, mlp_width, dtype),
        weight_TA.to(dtype),
        expert_TA,
        tiles,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_the_first_product_writes_all_that_the_second_reads(
    random: torch.Generator, dtype: torch.dtype
) -> None:
    """Blocks have places without a pair. What memory held there may be no number."""
    gate_up_EUD, _ = experts(random, 6, 72, 48, dtype)
    expert_TA = torch.rand(9, 6, generator=random, device=DEVICE).topk(3).indices
    blocks = gpu.sort_pairs(expert_TA, 6, TILES.pairs)
    h_ZF = torch.full((len(blocks.pair_Z), 48), torch.nan, dtype=dtype, device=DEVICE)
    x_TD = numbers(random, 9, 72, dtype=dtype)
    gpu.multiply_blocks(x_TD, gate_up_EUD, blocks, h_ZF, TILES.gate_up, each=3)
    num_places = int(blocks.num_blocks_1) * TILES.pairs
    assert num_places > expert_TA.numel()
    assert h_ZF[:num_places].isfinite().all()


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("tokens", [2, 9])
def test_rows_longer_than_a_block(
    monkeypatch: pytest.MonkeyPatch, random: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gpu.experts, "_BLOCK", 32)
    monkeypatch.setattr(gpu.experts, "_DOWN_NUMBERS", 64)
    weight_TA, expert_TA = torch.rand(tokens, 3, generator=random, device=DEVICE).topk(2)
    check(
        numbers(random, tokens, 70, dtype=dtype),
        experts(random, 3, 70, 90, dtype),
        weight_TA.to(dtype),
        expert_TA,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 40), (9, 40), (300, 40), (300, 4)])
def test_experts_that_all_tokens_or_none_chose(
    random: torch.Generator, tokens: int, num_experts: int, dtype: torch.dtype
) -> None:
    gate_up_EUD, down_EDF = experts(random, num_experts, 70, 5, dtype)
    expert_TA = torch.tensor([num_experts - 1, 0], device=DEVICE).repeat(tokens, 1)
    expert_TA[1:7, 1] = 2
    unused = torch.ones(num_experts, dtype=torch.bool, device=DEVICE)
    unused[expert_TA.flatten()] = False
    gate_up_EUD[unused] = torch.nan
    down_EDF[unused] = torch.nan
    x_TD = numbers(random, tokens, 70, dtype=dtype)
    weight_TA = numbers(random, tokens, 2, dtype=dtype)
    check(x_TD, (gate_up_EUD, down_EDF), weight_TA, expert_TA)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("first", [0, 6, 12, -6])
@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1, 40])
def test_experts_that_are_not_there_add_nothing(
    random: torch.Generator, tokens: int, first: int, dtype: torch.dtype
) -> None:
    """Six are there of twelve: the first, the last, and none; a token may have chosen no other."""
    weight_TA, expert_TA = torch.rand(tokens, 12, generator=random, device=DEVICE).topk(3)
    expert_TA[0] = torch.tensor([1, 5, 0], device=DEVICE)
    expert_TA[-1] = torch.tensor([11, 6, 9], device=DEVICE)
    check(
        numbers(random, tokens, 36, dtype=dtype),
        experts(random, 6, 36, 20, dtype),
        weight_TA.to(dtype),
        expert_TA - first,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("first", [0, 6, 12, -6])
def test_by_tma_experts_that_are_not_there_add_nothing(
    random: torch.Generator, first: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu.expert_products, "_takes_tma", is_aligned)
    weight_TA, expert_TA = torch.rand(40, 12, generator=random, device=DEVICE).topk(3)
    check(
        numbers(random, 40, 48, dtype=dtype),
        experts(random, 6, 48, 32, dtype),
        weight_TA.to(dtype),
        expert_TA - first,
        TILES_OF_64[0],
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1, 40])
def test_without_an_expert_that_is_there_the_sum_is_zero(
    random: torch.Generator, tokens: int, dtype: torch.dtype
) -> None:
    """And no weight is read."""
    weights = [torch.full_like(w, torch.nan) for w in experts(random, 6, 36, 20, dtype)]
    x_TD = numbers(random, tokens, 36, dtype=dtype)
    weight_TA = numbers(random, tokens, 2, dtype=dtype)
    expert_TA = torch.tensor([6, -1], device=DEVICE).repeat(tokens, 1)
    for multiply in (gpu.moe_by_token, partial(gpu.moe_by_expert, tiles=TILES)):
        y_TD = torch.full_like(x_TD, torch.nan)
        with nan_in_new_memory():
            multiply(x_TD, *weights, weight_TA, expert_TA.int(), y_TD)
        assert torch.equal(y_TD, torch.zeros_like(y_TD))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_there", [128, 32])
@pytest.mark.parametrize("tokens", [1, 8, 100, 256, 500, 3000])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_experts_of_real_widths_in_a_graph(
    random: torch.Generator, is_sorted: bool, tokens: int, num_there: int, dtype: torch.dtype
) -> None:
    """All are there of 128, or the last 32."""
    first = 128 - num_there
    tiles = rule_table(128, 8).find(max(tokens, FEW + 1))
    multiply = partial(gpu.moe_by_expert, tiles=tiles) if is_sorted else gpu.moe_by_token
    weights = experts(random, num_there, 2048, 768, dtype)
    x_TD = numbers(random, tokens, 2048, dtype=dtype)
    logits_TE = distinct_logits(random, tokens, 128, dtype)
    y_TD = torch.empty_like(x_TD)
    multiply(x_TD, *weights, *route(logits_TE, 8, True, first), y_TD)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(x_TD, *weights, *route(logits_TE, 8, True, first), y_TD)
    x_TD.copy_(numbers(random, tokens, 2048, dtype=dtype))
    logits_TE.copy_(distinct_logits(random, tokens, 128, dtype))
    graph.replay()
    weight_TA, expert_TA = route_reference(logits_TE, 8, True, first)
    wide = moe_reference(x_TD.float(), *(w.float() for w in weights), weight_TA.float(), expert_TA)
    same(y_TD, wide.to(dtype))


def test_a_cpu_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "load_cpu_kernels", lambda: object())
    logits_TE = torch.randn(3, 5)
    weight_TA, expert_TA = route(logits_TE, 2, True)
    expected_weight_TA, expected_expert_TA = route_reference(logits_TE, 2, True)
    assert torch.equal(weight_TA, expected_weight_TA)
    assert torch.equal(expert_TA, expected_expert_TA)
