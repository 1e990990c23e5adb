"""The Triton kernels of a mixture of experts against the references."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# J pairs of a token and an expert it chose, T tokens of a step, U both halves of a gated mlp: 2 F.

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.kernel import moe_reference, route_reference

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
from minisgl.kernel import dispatch, gpu, route
from tests.kernel.harness import DEVICE, DOT_DTYPES, DTYPES, numbers, same

pytestmark = pytest.mark.gpu
FEW = 4  # tokens that are computed by token; the interpreter is too slow for more


def distinct_logits(
    random: torch.Generator, tokens: int, num_experts: int, dtype: torch.dtype
) -> Tensor:
    rank_TE = torch.rand(tokens, num_experts, generator=random, device=DEVICE).argsort(dim=1)
    return (rank_TE / 16).to(dtype)


def routed(logits_TE: Tensor, each: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    weight_TA = logits_TE.new_empty(len(logits_TE), each)
    expert_TA = torch.empty_like(weight_TA, dtype=torch.int32)
    gpu.route(logits_TE, weight_TA, expert_TA, normalize)
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


@pytest.mark.parametrize(("tokens", "each", "num_experts"), [(1, 1, 1), (9, 3, 6), (1500, 3, 7)])
def test_each_expert_lists_its_pairs_in_order(
    random: torch.Generator, tokens: int, each: int, num_experts: int
) -> None:
    expert_TA = torch.randint(
        max(1, num_experts - 2), (tokens, each), generator=random, device=DEVICE
    )
    for dtype in (torch.int32, torch.int64):
        pair_EJ, count_E = gpu.list_pairs(expert_TA.to(dtype), num_experts)
        for expert, count in enumerate(count_E.tolist()):
            assert torch.equal(
                pair_EJ[expert, :count], (expert_TA.flatten() == expert).nonzero().flatten().int()
            )


def experts(
    random: torch.Generator, num: int, width: int, mlp_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    gate_up_EUD = numbers(random, num, 2 * mlp_width, width, dtype=dtype) / width**0.5
    return gate_up_EUD, numbers(random, num, width, mlp_width, dtype=dtype) / mlp_width**0.5


def check(
    x_TD: Tensor, weights: tuple[Tensor, Tensor], weight_TA: Tensor, expert_TA: Tensor
) -> None:
    y_TD = torch.full_like(x_TD, torch.nan)
    multiply = gpu.moe_by_token if len(x_TD) <= FEW else gpu.moe_by_expert
    multiply(x_TD, *weights, weight_TA, expert_TA, y_TD)
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


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 100, 256, 500, 3000])
@pytest.mark.parametrize("multiply", [gpu.moe_by_token, gpu.moe_by_expert])
def test_experts_of_real_widths_in_a_graph(
    random: torch.Generator, multiply: Callable[..., None], tokens: int, dtype: torch.dtype
) -> None:
    weights = experts(random, 128, 2048, 768, dtype)
    x_TD = numbers(random, tokens, 2048, dtype=dtype)
    logits_TE = distinct_logits(random, tokens, 128, dtype)
    y_TD = torch.empty_like(x_TD)
    multiply(x_TD, *weights, *route(logits_TE, 8, True), y_TD)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(x_TD, *weights, *route(logits_TE, 8, True), y_TD)
    x_TD.copy_(numbers(random, tokens, 2048, dtype=dtype))
    logits_TE.copy_(distinct_logits(random, tokens, 128, dtype))
    graph.replay()
    weight_TA, expert_TA = route_reference(logits_TE, 8, True)
    wide = moe_reference(x_TD.float(), *(w.float() for w in weights), weight_TA.float(), expert_TA)
    same(y_TD, wide.to(dtype))


def test_a_cpu_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "load_cpu_kernels", lambda: object())
    logits_TE = torch.randn(3, 5)
    weight_TA, expert_TA = route(logits_TE, 2, True)
    expected_weight_TA, expected_expert_TA = route_reference(logits_TE, 2, True)
    assert torch.equal(weight_TA, expected_weight_TA)
    assert torch.equal(expert_TA, expected_expert_TA)
