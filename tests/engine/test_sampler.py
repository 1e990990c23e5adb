"""The sampler: what it may choose, and how often it does."""

# Dimensions: B requests of a step, C candidates, V vocabulary, X a selection out of another
# dimension.

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import Req, ReqSlice, SamplingParams
from minisgl.distributed import SingleCommunicator
from minisgl.engine import sample_logits
from minisgl.engine.sampling_batch import send_sampling
from minisgl.kernel import SEGMENT_SIZE
from minisgl.kernel import sample as sample_module
from minisgl.layers import VocabShard
from minisgl.utils.staging import Staging

CPU = torch.device("cpu")
SMALL = 50
LARGE = 1500


def sampling_slice(params: SamplingParams, seed: int = 0, position: int = 1) -> ReqSlice:
    req = Req(0, np.zeros(1, dtype=np.int32), params, max_length=8, seed=seed)
    return ReqSlice(req, 0, position, samples=True)


def sample(logits_BV: Tensor, slices: list[ReqSlice]) -> Tensor:
    """The tokens of one rank, which has the whole vocabulary."""
    numbers, is_filtered = send_sampling(slices, Staging(CPU))
    vocab = VocabShard(logits_BV.shape[1], SingleCommunicator())
    return sample_logits(logits_BV, numbers, vocab, is_filtered=is_filtered)


def random_logits(vocab_size: int, width: float, seed: int = 0) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * width


def kept(logits_V: Tensor, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that can be chosen: those that are if noise prefers them beyond measure."""
    size = len(logits_V)
    wanted_V1 = torch.arange(size)[:, None]

    def preference(seed_V: Tensor, position_V: Tensor, number_VX: Tensor) -> Tensor:
        is_wanted_VX = number_VX == wanted_V1
        is_its_segment_VX = ~number_VX == wanted_V1 // SEGMENT_SIZE
        return (is_wanted_VX | is_its_segment_VX) * 1e9

    monkeypatch.setattr(sample_module, "cpu_kernels_for", lambda x: None)
    monkeypatch.setattr(sample_module, "gumbel_noise", preference)
    chosen_V = sample(logits_V.repeat(size, 1), [sampling_slice(params)] * size)
    return (chosen_V == torch.arange(size)).nonzero().flatten().tolist()


def kept_by_definition(logits_V: Tensor, params: SamplingParams) -> list[int]:
    """In float64, token by token: temperature, top_k, then top_p of what is left, and min_p."""
    score_V = logits_V.double() / params.temperature
    top_k = min(params.top_k or len(score_V), len(score_V))
    in_top_k_V = score_V >= score_V.sort(descending=True).values[top_k - 1]
    share_V = torch.softmax(score_V.masked_fill(~in_top_k_V, -math.inf), dim=0)
    likelier_V = torch.stack([share_V[score_V > score].sum() for score in score_V])
    in_top_p_V = (likelier_V < params.top_p) | (params.top_p == 1)
    in_min_p_V = share_V >= params.min_p * share_V.max()
    return (in_top_k_V & in_top_p_V & in_min_p_V).nonzero().flatten().tolist()


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": SMALL - 1},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.01},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 10, "top_p": 0.7},
    {"top_k": 10, "top_p": 1.0, "min_p": 0.001},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("width", [0.5, 3.0])
def test_filters_keep_what_their_definition_keeps(
    width: float, temperature: float, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        logits_V = random_logits(SMALL, width, seed)
        params = SamplingParams(temperature=temperature, **filters)
        assert kept(logits_V, params, monkeypatch) == kept_by_definition(logits_V, params)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_k": 1023},
        {"top_k": 1024},
        {"top_k": 1025},
        {"top_k": 1400, "top_p": 0.95},
        {"top_k": 1100, "top_p": 0.5},
        {"top_k": 1400, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=str,
)
def test_filters_that_keep_many_tokens_keep_what_their_definition_keeps(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_V = random_logits(LARGE, 0.7)
    params = SamplingParams(**filters)
    assert kept(logits_V, params, monkeypatch) == kept_by_definition(logits_V, params)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 2, 4]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.7}, [1, 2, 4]),
        ({"min_p": math.exp(-1)}, [1, 2, 4]),
        ({"top_p": 1.0, "top_k": 5}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_tokens_that_tie_with_the_last_kept_one_are_kept(
    filters: dict[str, Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_V = torch.tensor([0.0, 3.0, 2.0, 0.0, 2.0, -9.0])
    assert kept(logits_V, SamplingParams(**filters), monkeypatch) == expected


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0}], ids=str)
def test_of_equally_likely_tokens_all_are_kept(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept(torch.tensor([1.0, 5.0, 5.0, 5.0]), SamplingParams(**filters), monkeypatch) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("other", [{}, {"top_k": 3}, {"min_p": 1e-40}], ids=str)
def test_top_p_of_one_keeps_the_unlikeliest_token(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_V = torch.tensor([0.0, -40.0, -80.0])
    assert kept(logits_V, SamplingParams(top_p=1.0, **other), monkeypatch) == [0, 1, 2]


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_are_as_frequent_as_their_softmax_says(
    temperature: float, filters: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, **filters)
    logits_V = random_logits(16, 1.5)
    num_samples = 20_000
    kept_ids = kept_by_definition(logits_V, params)
    expected_C = torch.softmax(logits_V[kept_ids].double() / temperature, dim=0) * num_samples

    slices = [sampling_slice(params, seed=n % 100, position=n) for n in range(num_samples)]
    counts_V = sample(logits_V.repeat(num_samples, 1), slices).bincount(minlength=16)

    assert counts_V.sum() == counts_V[kept_ids].sum()
    freedom = len(kept_ids) - 1
    chi_square = ((counts_V[kept_ids] - expected_C) ** 2 / expected_C).sum()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_requests_get_the_likeliest_token() -> None:
    logits_BV = torch.stack([random_logits(SMALL, 1.0, seed) for seed in range(8)])
    slices = [sampling_slice(SamplingParams(temperature=0.0, top_k=5, top_p=0.5))] * 8
    _, is_filtered = send_sampling(slices, Staging(CPU))
    assert not is_filtered
    assert torch.equal(sample(logits_BV, slices), logits_BV.argmax(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 100.0])
def test_top_k_of_one_is_greedy_also_among_ties(temperature: float, dtype: torch.dtype) -> None:
    logits_V = torch.zeros(LARGE, dtype=dtype)
    logits_V[[70, 71, 1030, LARGE - 1]] = 0.5
    params = SamplingParams(temperature=temperature, top_k=1, top_p=0.9)
    slices = [sampling_slice(params, seed=n, position=n + 1) for n in range(20)]
    assert sample(logits_V.repeat(20, 1), slices).tolist() == [70] * 20


def test_a_request_gets_the_same_token_alone_and_among_others() -> None:
    each = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.9),  # needs all candidates
        SamplingParams(temperature=0.5, min_p=0.3),
        SamplingParams(temperature=3.0, top_k=1300, top_p=0.99),
    ] * 20
    logits_BV = torch.stack([random_logits(LARGE, 1.0, seed) for seed in range(len(each))])
    slices = [sampling_slice(params, seed=n, position=n + 1) for n, params in enumerate(each)]

    together = sample(logits_BV, slices).tolist()
    alone = [int(sample(logits_BV[n : n + 1], slices[n : n + 1])) for n in range(len(each))]

    assert together == alone


def test_logits_are_left_alone() -> None:
    logits_BV = random_logits(SMALL, 1.0).repeat(4, 1)
    before = logits_BV.clone()
    sample(logits_BV, [sampling_slice(SamplingParams(top_k=3))] * 4)
    assert torch.equal(logits_BV, before)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38, 1e-42, 5e-324])
def test_a_temperature_near_zero_is_almost_greedy(
    temperature: float, filters: dict[str, Any]
) -> None:
    for logits_V in (
        random_logits(SMALL, 4.0),
        random_logits(SMALL, 4.0) - 100,
        torch.tensor([0.0, -1.0, 2.0, 1.0]),
    ):
        params = SamplingParams(temperature=temperature, **filters)
        slices = [sampling_slice(params, position=position) for position in range(20)]
        chosen_B = sample(logits_V.repeat(20, 1), slices)
        assert chosen_B.tolist() == [int(logits_V.argmax())] * 20


@pytest.mark.parametrize(
    ("seed", "likely", "certain"),
    [pytest.param(64, 9096, 9000, id="token"), pytest.param(2649367, 600, 3, id="segment")],
)
def test_noise_never_outweighs_a_certain_token(seed: int, likely: int, certain: int) -> None:
    """The hash of seed, position and the likely token, or its segment, is all ones.

    Infinite noise would choose the token.
    """
    position = 7
    logits_BV = torch.zeros(1, likely + 10)
    logits_BV[0, certain] = 100.0
    assert sample(logits_BV, [sampling_slice(SamplingParams(), seed, position)]).tolist() == [
        certain
    ]
