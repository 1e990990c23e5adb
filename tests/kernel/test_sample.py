"""Sampling by segments: three implementations against its definition, and how often tokens come."""

# Dimensions: B requests of a step, V vocabulary,
# X a selection out of another dimension: segments, each of which then has tokens V.

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.core import NO_TOKEN
from minisgl.kernel import SEGMENT_SIZE, choose_scored_tokens, choose_tokens, gumbel_noise
from minisgl.kernel import sample as sample_module
from tests.kernel.harness import DEVICE

DTYPES = [torch.float32, torch.bfloat16]
Choose = Callable[..., Tensor]


def triton_kernel(*args: Tensor | int | None) -> Tensor:
    from minisgl.kernel import gpu

    on_device = [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]
    return gpu.choose_scored_tokens(*on_device).cpu()


@pytest.fixture(params=["compiled", "reference", pytest.param("Triton", marks=pytest.mark.gpu)])
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """A `choose_scored_tokens` that takes tensors of a CPU."""
    if request.param == "Triton":
        pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
        return triton_kernel
    if request.param == "reference":
        monkeypatch.setattr(sample_module, "cpu_kernels_for", lambda x: None)
    return choose_scored_tokens


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def seeds(random: torch.Generator, batch_size: int) -> tuple[Tensor, Tensor]:
    """Seeds, as int64, and positions."""
    seed_B = torch.randint(-(2**62), 2**62, (batch_size,), generator=random)
    return seed_B, torch.randint(2**17, (batch_size,), generator=random).int()


def halves(seed_B: Tensor) -> Tensor:
    return seed_B.view(torch.int32).view(-1, 2)


def token_ids(scored_B: Tensor) -> Tensor:
    return scored_B.int()


def allowed(logits_BV: Tensor, lowest_B: Tensor | None, temperature_B: Tensor) -> Tensor:
    """In float64, minus infinity for a token that may not be chosen."""
    if lowest_B is None:
        return logits_BV.double()
    is_hidden_BV = (logits_BV.float() < lowest_B[:, None]) & (temperature_B > 0)[:, None]
    return logits_BV.double().masked_fill(is_hidden_BV, -torch.inf)


def segment_scores(
    allowed_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor, first: int
) -> Tensor:
    """The score of each segment, in float64 and straight from its definition."""
    missing = -allowed_BV.shape[1] % SEGMENT_SIZE
    padded_BV = torch.nn.functional.pad(allowed_BV, (0, missing), value=-torch.inf)
    logits_BXV = padded_BV.unflatten(1, (-1, SEGMENT_SIZE))
    heat_B1 = temperature_B.double()[:, None]
    sum_BX = heat_B1 * (logits_BXV / heat_B1[:, :, None].clamp(min=1e-300)).logsumexp(dim=2)
    segment_X = first // SEGMENT_SIZE + torch.arange(logits_BXV.shape[1])
    noise_BX = gumbel_noise(seed_B, position_B.long(), (-1 - segment_X).int())
    return torch.where(heat_B1 > 0, sum_BX + heat_B1 * noise_BX, logits_BXV.amax(dim=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first_token", "vocab_size"),
    [(0, 1), (0, 256), (0, 257), (512, 700), (40_192, 2304), (0, 9001)],
)
def test_the_segment_and_its_token_have_the_best_scores(
    choose: Choose,
    random: torch.Generator,
    first_token: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> None:
    """Scores are rounded otherwise, so another may win, but not by more and in few rows."""
    temperature_B = torch.tensor([0.0, 1e-30, 0.1, 0.7, 1.0, 1.0, 2.0, 50.0])
    batch_size = len(temperature_B)
    num_best = 0
    num_rows = 0
    for width in (0.0, 1.0, 8.0):
        logits_BV = (torch.randn(batch_size, vocab_size, generator=random) * width).to(dtype)
        seed_B, position_B = seeds(random, batch_size)
        kept_B = logits_BV.float().amax(dim=1) - torch.arange(batch_size) % 3
        for lowest_B in (None, kept_B):
            allowed_BV = allowed(logits_BV, lowest_B, temperature_B)
            scored_B = choose(
                logits_BV, lowest_B, temperature_B, halves(seed_B), position_B, first_token
            )
            column_B = token_ids(scored_B) - first_token
            segment_B = column_B // SEGMENT_SIZE

            score_BX = segment_scores(allowed_BV, temperature_B, seed_B, position_B, first_token)
            tolerance_B = 2e-5 * (1 + temperature_B)
            chosen_B = score_BX.gather(1, segment_B[:, None])[:, 0]
            assert (score_BX.amax(dim=1) - chosen_B <= tolerance_B).all()

            id_V = torch.arange(vocab_size, dtype=torch.int32)
            noise_BV = gumbel_noise(seed_B, position_B.long(), first_token + id_V)
            is_inside_BV = id_V // SEGMENT_SIZE == segment_B[:, None]
            noisy_BV = allowed_BV + temperature_B.double()[:, None] * noise_BV
            noisy_BV = noisy_BV.masked_fill(~is_inside_BV, -torch.inf)
            chosen_B = noisy_BV.gather(1, column_B[:, None])[:, 0]
            assert (chosen_B > -torch.inf).all()
            assert (noisy_BV.amax(dim=1) - chosen_B <= tolerance_B).all()

            is_best_B = score_BX.argmax(dim=1) == segment_B
            is_best_B &= noisy_BV.argmax(dim=1) == column_B
            num_best += int(is_best_B.sum())
            num_rows += batch_size
    assert num_best >= num_rows - 1


@pytest.mark.parametrize("keeps_all", [True, False])
def test_tokens_are_as_frequent_as_their_softmax_says(
    choose: Choose, random: torch.Generator, keeps_all: bool, request: pytest.FixtureRequest
) -> None:
    """Also in a cell of tokens of two segments, in a segment of few tokens, on two ranks."""
    vocab_size = 2 * SEGMENT_SIZE + 88
    temperature = 0.8
    is_fast = "Triton" not in request.node.name or DEVICE.type == "cuda"
    num_samples = 40_000 if is_fast else 400
    tokens_of_cell = 1 if is_fast else 60
    logits_V = torch.randn(vocab_size, generator=random) * 0.5
    logits_V[SEGMENT_SIZE : SEGMENT_SIZE + 40] -= 3  # of the second segment the end is likelier
    lowest_B = None if keeps_all else torch.full((num_samples,), 0.1)
    logits_BV = logits_V.repeat(num_samples, 1)
    temperature_B = torch.full((num_samples,), temperature)
    seed_B = torch.arange(num_samples) % 100
    position_B = torch.arange(num_samples, dtype=torch.int32)
    sampling = (lowest_B, temperature_B, halves(seed_B), position_B)

    token_B = token_ids(choose(logits_BV, *sampling, 0))
    end = 2 * SEGMENT_SIZE
    of_ranks = [
        choose(logits_BV[:, :end].contiguous(), *sampling, 0),
        choose(logits_BV[:, end:].contiguous(), *sampling, end),
    ]
    assert torch.equal(token_ids(torch.stack(of_ranks).amin(dim=0)), token_B)

    lowest_1 = None if lowest_B is None else lowest_B[:1]
    allowed_V = allowed(logits_V[None], lowest_1, temperature_B[:1])[0]
    expected_V = torch.softmax(allowed_V / temperature, dim=0) * num_samples
    assert (expected_V[token_B] > 0).all()
    cell_V = torch.arange(vocab_size) // tokens_of_cell
    count = torch.bincount(cell_V[token_B], minlength=int(cell_V[-1]) + 1)
    expected = torch.bincount(cell_V, weights=expected_V)
    has_any = expected > 0
    chi_square = ((count - expected)[has_any] ** 2 / expected[has_any]).sum()
    freedom = int(has_any.sum()) - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_a_seed_gives_the_tokens_that_it_always_gave(choose: Choose) -> None:
    seed_B = torch.tensor([0, 1234, -1, 7])
    position_B = torch.tensor([1, 56, 7, 100], dtype=torch.int32)
    for logits_V, heat, expected in (
        (torch.zeros(1000), 1.0, [151, 497, 994, 368]),
        (torch.arange(1000.0) % 7, 2.0, [151, 349, 994, 368]),
    ):
        logits_BV = logits_V.repeat(4, 1)
        heat_B = torch.full((4,), heat)
        scored_B = choose(logits_BV, None, heat_B, halves(seed_B), position_B, 0)
        assert token_ids(scored_B).tolist() == expected


def test_a_token_of_a_segment_does_not_follow_from_the_score_of_the_segment() -> None:
    """Its noise has another number, so no token has the noise of its segment or of another one."""
    number_V = torch.arange(-600, 150_000, dtype=torch.int32)
    noise_V = gumbel_noise(torch.tensor([3]), torch.tensor([9]), number_V)[0].double()
    of_segment_X = noise_V[:600].flip(0)
    for begin in (600, 601, 600 + SEGMENT_SIZE):
        pair = torch.stack((of_segment_X, noise_V[begin : begin + 600]))
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(600)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # beside infinity
def test_rows_that_are_not_of_numbers(
    choose: Choose, temperature: float, dtype: torch.dtype
) -> None:
    """A number wins from NaN and minus infinity, which are never chosen, infinity from all."""
    size = 2 * SEGMENT_SIZE + 9
    logits_BV = torch.zeros(8, size, dtype=dtype)
    logits_BV[0] = -torch.inf
    logits_BV[1] = torch.nan
    logits_BV[2] = -torch.inf
    logits_BV[2, size - 1] = -2
    logits_BV[3] = torch.nan
    logits_BV[3, 300] = -2
    logits_BV[4, [298, 299, size - 1]] = torch.inf
    logits_BV[5, ::2] = torch.nan
    logits_BV[6, :-3] = -torch.inf
    logits_BV[7, :-1] = -4
    lowest_B = torch.full((8,), -8.0)
    lowest_B[7] = -1
    temperature_B = torch.full((8,), temperature)
    seed_B, position_B = seeds(torch.Generator().manual_seed(1), 8)
    for lowest in (None, lowest_B):
        scored_B = choose(logits_BV, lowest, temperature_B, halves(seed_B), position_B, 0)
        token_B = token_ids(scored_B).tolist()
        assert token_B[:5] == [NO_TOKEN, NO_TOKEN, size - 1, 300, 298]
        assert token_B[5] % 2 == 1
        assert token_B[6] in range(size - 3, size)
        if lowest is not None or temperature == 0:
            assert token_B[7] == size - 1


def test_logits_that_change_in_one_segment_leave_the_choice_among_the_others(
    random: torch.Generator,
) -> None:
    logits_BV = torch.randn(64, 1024, generator=random)
    seed_B, position_B = seeds(random, 64)
    sampling = (None, torch.ones(64), halves(seed_B), position_B)
    before_B = choose_tokens(logits_BV, *sampling)
    logits_BV[:, :SEGMENT_SIZE] = -torch.inf
    after_B = choose_tokens(logits_BV, *sampling)
    was_elsewhere_B = before_B >= SEGMENT_SIZE
    assert 20 < was_elsewhere_B.sum() < 64
    assert torch.equal(after_B[was_elsewhere_B], before_B[was_elsewhere_B])
