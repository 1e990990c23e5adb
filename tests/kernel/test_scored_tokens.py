"""Parts of a vocabulary give the token of the whole, from one number each."""

# Dimensions: B requests of a step, V vocabulary.

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.core import NO_TOKEN
from minisgl.kernel import SEGMENT_SIZE, choose_scored_tokens, choose_tokens
from tests.kernel.harness import DEVICE, DTYPES, numbers

Choice = tuple[Callable[..., Tensor], Callable[..., Tensor]]
BATCH_SIZE = 6


def gpu_kernels() -> Choice:
    pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
    from minisgl.kernel import gpu

    return gpu.choose_tokens, gpu.choose_scored_tokens


IMPLEMENTATIONS = [
    pytest.param(lambda: (choose_tokens, choose_scored_tokens), id="by dispatch"),
    pytest.param(gpu_kernels, id="Triton", marks=pytest.mark.gpu),
]


def arguments(random: torch.Generator, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds and positions; greedy requests, cool and hot ones."""
    temperature_B = torch.tensor([0.0, 1.0, 0.7, 0.0, 1e-30, 50.0], device=DEVICE)
    seed_B = torch.randint(-(2**62), 2**62, (BATCH_SIZE,), generator=random, device=DEVICE) + seed
    position_B = torch.arange(BATCH_SIZE, dtype=torch.int32, device=DEVICE) * 3
    return temperature_B, seed_B.view(torch.int32).view(-1, 2), position_B


def shards(logits_BV: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """The first token of each rank, and its logits; the last ranks have too few tokens, or none."""
    vocab_size = logits_BV.shape[1]
    each = -(-vocab_size // (size * SEGMENT_SIZE)) * SEGMENT_SIZE
    padded_BV = torch.nn.functional.pad(logits_BV, (0, size * each - vocab_size), value=-torch.inf)
    return [
        (rank * each, padded_BV[:, rank * each : (rank + 1) * each].contiguous())
        for rank in range(size)
    ]


def best_of_shards(
    choose: Callable[..., Tensor], logits_BV: Tensor, size: int, *args: Tensor | None
) -> Tensor:
    scored = [choose(shard, *args, first) for first, shard in shards(logits_BV, size)]
    assert all(scored_B.dtype == torch.int64 for scored_B in scored)
    return torch.stack(scored).amin(dim=0).int()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_short_last_segment_has_the_score_that_it_has_with_padding(
    random: torch.Generator, dtype: torch.dtype
) -> None:
    """On a CPU weights are added up in one order, whichever rank has the segment."""
    num_rows = 400
    last_BV = numbers(random, num_rows, 45, dtype=dtype).cpu()
    logits_BV = torch.nn.functional.pad(last_BV, (SEGMENT_SIZE, 0), value=-torch.inf)
    position_B = torch.arange(num_rows, dtype=torch.int32)
    seed_B2 = torch.stack([position_B, position_B], dim=1)
    sampling = (torch.ones(num_rows), seed_B2, position_B)
    whole_B = choose_scored_tokens(logits_BV, None, *sampling, 0)
    _, padded_BV = shards(logits_BV, 2)[1]
    assert torch.equal(choose_scored_tokens(padded_BV, None, *sampling, SEGMENT_SIZE), whole_B)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "vocab_size"), [(1, 64), (2, 601), (3, 5), (3, 1024), (4, 5), (4, 901)]
)
def test_the_smallest_number_has_the_token_of_the_whole(
    random: torch.Generator,
    size: int,
    vocab_size: int,
    dtype: torch.dtype,
    implementation: Callable[[], Choice],
) -> None:
    choose_whole, choose_part = implementation()
    for width in (0.01, 1.0, 10.0):
        logits_BV = numbers(random, BATCH_SIZE, vocab_size, dtype=dtype) * width
        sampling = arguments(random)
        lowest_B = logits_BV.float().amax(dim=1) - width / 3
        for lowest in (None, lowest_B):
            expected_B = choose_whole(logits_BV, lowest, *sampling)
            assert torch.equal(
                best_of_shards(choose_part, logits_BV, size, lowest, *sampling), expected_B
            )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_scores_the_lowest_id_wins_whatever_the_sign_of_zero(
    size: int, implementation: Callable[[], Choice]
) -> None:
    _, choose_part = implementation()
    logits_BV = torch.full((4, 1001), -7.0, device=DEVICE)
    logits_BV[0, [40, 200, 300, 1000]] = 2.0
    logits_BV[1, [40, 1000]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    logits_BV[2, [551, 1000]] = torch.tensor([0.0, -0.0], device=DEVICE)
    greedy_B = torch.zeros(4, device=DEVICE)
    zeros_B2 = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    best_B = best_of_shards(
        choose_part, logits_BV, size, None, greedy_B, zeros_B2, zeros_B2[:, 0].contiguous()
    )
    assert best_B.tolist() == [40, 40, 551, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [-torch.inf, torch.nan], ids=["banned", "not a number"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_best_there_is_none(
    temperature: float, value: float, implementation: Callable[[], Choice]
) -> None:
    choose_whole, choose_part = implementation()
    logits_BV = torch.full((1, 769), value, device=DEVICE)
    temperature_B = torch.full((1,), temperature, device=DEVICE)
    zeros_B2 = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    sampling = (None, temperature_B, zeros_B2, zeros_B2[:, 0].contiguous())
    assert best_of_shards(choose_part, logits_BV, 4, *sampling).tolist() == [NO_TOKEN]
    assert choose_whole(logits_BV, *sampling).tolist() == [NO_TOKEN]
    logits_BV[0, 768] = -3.0  # the last rank has this token and padding
    assert best_of_shards(choose_part, logits_BV, 4, *sampling).tolist() == [768]
    assert choose_whole(logits_BV, *sampling).tolist() == [768]
