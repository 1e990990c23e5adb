"""rms_norm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.kernel import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
EPS = 1e-5


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_formula(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight_D.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 576), (15, 16), (2, 1)], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 1e4])
def test_rms_norm_equals_its_formula(
    size: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = (numbers(*shape) * size).to(dtype)
    weight_D = numbers(shape[-1], seed=1).to(dtype)
    normed = rms_norm(x, weight_D, EPS)
    assert normed.dtype == dtype
    torch.testing.assert_close(
        normed.double(), by_formula(x, weight_D, EPS), atol=1e-6, rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("mean", [1.0, 100.0])
def test_a_mean_is_not_taken_away(mean: float) -> None:
    x = numbers(4, 32) + mean
    weight_D = torch.ones(32)
    torch.testing.assert_close(
        rms_norm(x, weight_D, EPS).double(), by_formula(x, weight_D, EPS), atol=1e-5, rtol=0
    )


def test_epsilon_counts() -> None:
    x = numbers(4, 32)
    weight_D = torch.ones(32)
    torch.testing.assert_close(
        rms_norm(x, weight_D, 2.0).double(), by_formula(x, weight_D, 2.0), atol=1e-5, rtol=0
    )


def test_zeros_stay_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


def test_one_outlier_leaves_the_other_rows_alone() -> None:
    x = numbers(3, 64)
    x[1, 5] = 1e6
    torch.testing.assert_close(
        rms_norm(x, torch.ones(64), EPS).double(),
        by_formula(x, torch.ones(64), EPS),
        atol=1e-5,
        rtol=1e-5,
    )


def test_rows_that_lie_apart_are_normed_like_a_copy_and_left_alone() -> None:
    x = numbers(5, 48)
    weight_D = numbers(16, seed=1)
    before = x.clone()
    rows = x[:, 16:32]
    assert torch.equal(rms_norm(rows, weight_D, EPS), rms_norm(rows.contiguous(), weight_D, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_keeps_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight_D = (numbers(7, 576, seed=seed).to(dtype) for seed in range(3))
    sum_TD = x + residual
    normed = add_rms_norm(x, residual, weight_D[0], EPS)
    assert torch.equal(residual, sum_TD)
    torch.testing.assert_close(
        normed.double(), by_formula(sum_TD, weight_D[0], EPS), atol=1e-6, rtol=2 * TOLERANCE[dtype]
    )
