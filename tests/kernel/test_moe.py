"""The MoE reference against a loop over tokens and their experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.kernel import moe_reference, route_reference

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp: 2 F.

WIDTH = 12
MLP_WIDTH = 10


def loop(
    x_TD: Tensor, gate_up_EUD: Tensor, down_EDF: Tensor, weight_TA: Tensor, expert_TA: Tensor
) -> Tensor:
    """Sum in float64, token by token and expert by expert."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for token, x_D in enumerate(x_TD.double()):
        for weight, expert in zip(
            weight_TA[token].tolist(), expert_TA[token].tolist(), strict=True
        ):
            if not 0 <= expert < len(down_EDF):
                continue
            gate_F = gate_up_EUD[expert, :MLP_WIDTH].double() @ x_D
            up_F = gate_up_EUD[expert, MLP_WIDTH:].double() @ x_D
            out_TD[token] += weight * (
                down_EDF[expert].double() @ (gate_F / (1 + torch.exp(-gate_F)) * up_F)
            )
    return out_TD


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize(("num_experts", "each"), [(1, 1), (8, 1), (8, 3), (4, 4)])
def test_moe_reference_equals_a_loop(num_tokens: int, num_experts: int, each: int) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, WIDTH, generator=random)
    gate_up_EUD = torch.randn(num_experts, 2 * MLP_WIDTH, WIDTH, generator=random)
    down_EDF = torch.randn(num_experts, WIDTH, MLP_WIDTH, generator=random)
    weight_TA, expert_TA = torch.rand(num_tokens, num_experts, generator=random).topk(each)

    out_TD = moe_reference(x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA)

    assert out_TD.dtype == torch.float32
    expected = loop(x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA)
    torch.testing.assert_close(out_TD.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 3, 6, -8, 8])
def test_experts_that_are_not_there_add_nothing(first: int) -> None:
    """Two of eight are there: all, some or none of a token's experts."""
    random = torch.Generator().manual_seed(first + 8)
    x_TD = torch.randn(9, WIDTH, generator=random)
    gate_up_EUD = torch.randn(2, 2 * MLP_WIDTH, WIDTH, generator=random)
    down_EDF = torch.randn(2, WIDTH, MLP_WIDTH, generator=random)
    weight_TA, expert_TA = torch.rand(9, 8, generator=random).topk(3)
    expert_TA -= first

    out_TD = moe_reference(x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA)

    expected = loop(x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA)
    torch.testing.assert_close(out_TD.double(), expected, atol=1e-4, rtol=1e-5)


def test_the_numbers_of_chosen_experts_count_from_the_first_that_is_there() -> None:
    logits_TE = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    weight_TA, expert_TA = route_reference(logits_TE, 3, True)
    same_weight_TA, number_TA = route_reference(logits_TE, 3, True, first=5)
    assert torch.equal(number_TA, expert_TA - 5)
    assert number_TA.dtype == torch.int32
    assert torch.equal(same_weight_TA, weight_TA)


def test_experts_that_no_token_chose_are_not_read() -> None:
    gate_up_EUD = torch.full((3, 2 * MLP_WIDTH, WIDTH), torch.nan)
    down_EDF = torch.full((3, WIDTH, MLP_WIDTH), torch.nan)
    gate_up_EUD[1] = 1.0
    down_EDF[1] = 1.0
    out_TD = moe_reference(
        torch.ones(2, WIDTH), gate_up_EUD, down_EDF, torch.ones(2, 1), torch.ones(2, 1).long()
    )
    assert torch.isfinite(out_TD).all()
