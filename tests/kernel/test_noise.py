"""Gumbel noise: a fixed function of seed, position and number, distributed as its name says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minisgl.kernel import gumbel_noise

EULER_GAMMA = 0.5772156649
MASK = 2**32 - 1


def numbers(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.int32)


def noise(seed: int, position: int, size: int) -> Tensor:
    return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), numbers(size))[0]


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def one_by_one(seed: int, position: int, number: int) -> float:
    """The noise of one number, written with Python's integers and floats."""
    key = lowbias32(seed & MASK ^ lowbias32(seed >> 32 & MASK ^ lowbias32(position)))
    bits = lowbias32(lowbias32(number & MASK ^ key) ^ key)
    return -math.log(-math.log((bits + 0.5) / 2**32))


def uniform(noise_V: Tensor) -> Tensor:
    """The number in (0, 1) that was made Gumbel.

    Rounding changes this number little, while it changes noise in the tails much.
    """
    return torch.exp(-torch.exp(-noise_V.double()))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_noise_equals_its_definition_in_integers(seed: int, position: int) -> None:
    number_V = numbers(300) - 100  # segments have negative numbers
    expected = [one_by_one(seed, position, number) for number in number_V.tolist()]
    noise_V = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), number_V)[0]
    difference_V = uniform(noise_V) - uniform(torch.tensor(expected))
    assert difference_V.abs().max() < 1e-6


GOLDEN = {  # first five tokens; what a seed gives must never change
    (0, 1): [1.899175, -1.645199, 1.419652, -1.007509, -0.057256],
    (1234, 56): [-0.299934, -0.617457, 0.215329, 2.831047, 0.244017],
    (-1, 7): [0.697805, 0.429704, 1.519999, 0.798601, 1.127609],
}


@pytest.mark.parametrize(("seed", "position"), GOLDEN)
def test_noise_is_what_it_always_was(seed: int, position: int) -> None:
    torch.testing.assert_close(
        noise(seed, position, 5), torch.tensor(GOLDEN[seed, position]), atol=1e-5, rtol=0
    )


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise_BV = gumbel_noise(torch.arange(64), torch.arange(64) % 7, numbers(8192))
    standard_error = math.sqrt(math.pi**2 / 6 / noise_BV.numel())
    assert noise_BV.dtype == torch.float32
    assert abs(noise_BV.double().mean() - EULER_GAMMA) < 5 * standard_error
    assert noise_BV.double().var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("quantile", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_noise_has_the_quantiles_of_a_gumbel_distribution(quantile: float) -> None:
    position_B = torch.zeros(32, dtype=torch.int64)
    noise_V = gumbel_noise(torch.arange(32), position_B, numbers(8192)).flatten()
    below = (noise_V < -math.log(-math.log(quantile))).double().mean().item()
    assert abs(below - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / len(noise_V))


@pytest.mark.parametrize("vary", ["seed", "seed's high half", "position"])
def test_neighbouring_requests_have_unrelated_noise(vary: str) -> None:
    steps = torch.arange(64)
    zeros = torch.zeros_like(steps)
    seeds = {"seed": steps, "seed's high half": steps << 32, "position": zeros}
    seed_B = seeds[vary]
    position_B = steps if vary == "position" else zeros
    noise_BV = gumbel_noise(seed_B, position_B, numbers(4096)).double()
    correlation_BB = torch.corrcoef(noise_BV) - torch.eye(64)
    assert correlation_BB.abs().max() < 6 / math.sqrt(4096)


def test_neighbouring_tokens_have_unrelated_noise() -> None:
    position_B = torch.zeros(4096, dtype=torch.int64)
    noise_BV = gumbel_noise(torch.arange(4096), position_B, numbers(64)).double()
    correlation_VV = torch.corrcoef(noise_BV.T) - torch.eye(64)
    assert correlation_VV.abs().max() < 6 / math.sqrt(4096)


def test_noise_of_a_request_is_the_same_in_any_batch_and_any_vocabulary() -> None:
    seed_B = torch.tensor([5, 9, -3])
    position_B = torch.tensor([2, 2, 40])
    together = gumbel_noise(seed_B, position_B, numbers(1000))
    alone = torch.stack(
        [noise(int(s), int(p), 1000) for s, p in zip(seed_B, position_B, strict=True)]
    )
    assert torch.equal(together, alone)
    assert torch.equal(together[:, :77], gumbel_noise(seed_B, position_B, numbers(77)))


def test_each_request_may_have_numbers_of_its_own() -> None:
    seed_B = torch.tensor([5, 9])
    position_B = torch.tensor([2, 40])
    number_BV = torch.stack((numbers(30), 70 - numbers(30)))
    noise_BV = gumbel_noise(seed_B, position_B, number_BV)
    assert torch.equal(noise_BV[0], noise(5, 2, 30))
    assert torch.equal(noise_BV[1], noise(9, 40, 71)[number_BV[1].long()])


def test_noise_leaves_its_arguments_alone() -> None:
    seed_B = torch.tensor([2**40 + 3])
    position_B = torch.tensor([17])
    number_V = numbers(10)
    gumbel_noise(seed_B, position_B, number_V)
    assert (seed_B.item(), position_B.item()) == (2**40 + 3, 17)
    assert torch.equal(number_V, numbers(10))


def test_noise_is_finite_even_where_the_hash_is_all_ones() -> None:
    """Infinite noise would choose its token whatever the logits say."""
    seed = 64
    position = 7
    token = 9096  # with this seed and position, the highest 24 bits of its hash are ones
    assert one_by_one(seed, position, token) > 16
    assert torch.isfinite(noise(seed, position, token + 1)).all()


def test_the_seed_minus_one_is_not_the_seed_of_32_ones() -> None:
    assert not torch.equal(noise(-1, 0, 100), noise(2**32 - 1, 0, 100))
