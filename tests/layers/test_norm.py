"""Norms and gated activations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minisgl.kernel import gelu_and_mul, silu_and_mul
from minisgl.layers import RMSNorm, RMSNormFused
from tests.layers.sources import RandomSource

WIDTH = 24
EPS = 0.01
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_formula(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (5, WIDTH)])
def test_rms_norm_equals_its_formula(shape: tuple[int, ...]) -> None:
    source = RandomSource()
    norm = RMSNorm(WIDTH, EPS)
    norm.load(source, "norm")
    x = numbers(*shape) * 3
    expected = by_formula(x, source.weights["norm.weight"])
    torch.testing.assert_close(norm.forward(x).double(), expected, atol=1e-5, rtol=0)


def test_fused_norm_adds_the_residual_and_hands_on_the_sum() -> None:
    source = RandomSource()
    norm = RMSNormFused(WIDTH, EPS)
    norm.load(source, "norm")
    x_TD = numbers(5, WIDTH)
    residual_TD = numbers(5, WIDTH, seed=1)
    sum_TD = x_TD + residual_TD
    normed_TD, handed_on_TD = norm.forward(x_TD.clone(), residual_TD.clone())
    torch.testing.assert_close(handed_on_TD, sum_TD)
    torch.testing.assert_close(
        normed_TD.double(), by_formula(sum_TD, source.weights["norm.weight"]), atol=1e-5, rtol=0
    )


def test_fused_norm_without_a_residual_hands_on_its_input_unchanged() -> None:
    source = RandomSource()
    norm = RMSNormFused(WIDTH, EPS)
    norm.load(source, "norm")
    x_TD = numbers(5, WIDTH)
    normed_TD, handed_on_TD = norm.forward(x_TD.clone(), None)
    assert torch.equal(handed_on_TD, x_TD)
    torch.testing.assert_close(
        normed_TD.double(), by_formula(x_TD, source.weights["norm.weight"]), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("dtype", "atol"), DTYPES.items())
def test_silu_and_mul_equals_its_formula(dtype: torch.dtype, atol: float) -> None:
    gate = numbers(7, WIDTH, dtype=dtype)
    up = numbers(7, WIDTH, dtype=dtype, seed=1)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    torch.testing.assert_close(silu_and_mul(gate, up).double(), expected, atol=atol, rtol=atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES.items())
def test_gelu_and_mul_equals_its_formula(dtype: torch.dtype, atol: float) -> None:
    gate = numbers(7, WIDTH, dtype=dtype)
    up = numbers(7, WIDTH, dtype=dtype, seed=1)
    x = gate.double()
    gelu = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(
        gelu_and_mul(gate, up).double(), gelu * up.double(), atol=atol, rtol=atol
    )
