"""Ranks with parts of the vocabulary choose what one rank chooses, and exchange few numbers."""

# Dimensions: B requests of a step, L positions of a sequence, R rows of the tables, V vocabulary,
# W words of 32 bits, X a selection out of another dimension.

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.core import Grammar, Req, ReqSlice, SamplingParams, TokenLogprobs
from minisgl.distributed import DistributedCommunicator, SingleCommunicator
from minisgl.engine.sampler import Sampler, SamplingInputs
from minisgl.engine.sampling_batch import SamplingNumbers, has_filters, sampling_arrays
from minisgl.layers import VocabShard
from minisgl.utils.staging import Staging
from tests.distributed.groups import in_group

CPU = torch.device("cpu")
NUM_POSITIONS = 40
EOS_ID = 2
# The first rank has all tokens of 20; the last has few of 901; of 2048 all have as many. Each
# number of ranks meets each vocabulary, and each dtype both numbers.
SHAPES = [
    (2, 20, torch.float32),
    (4, 20, torch.bfloat16),
    (2, 901, torch.bfloat16),
    (4, 901, torch.float32),
    (2, 2048, torch.float32),
    (4, 2048, torch.bfloat16),
]


class CountingCommunicator(DistributedCommunicator):
    """Counts the bytes that this rank gives, by the kind of exchange."""

    def __init__(self, comm: DistributedCommunicator) -> None:
        super().__init__(comm.info)
        self._comm = comm
        self.num_bytes: dict[str, int] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce(self._counted("all_reduce", x))

    def all_reduce_min(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce_min(self._counted("all_reduce_min", x))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(self._counted("all_gather", x))

    def gather(self, x: Tensor) -> Tensor | None:
        return self._comm.gather(self._counted("gather", x))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._comm.broadcast(self._counted("broadcast", x))

    def _counted(self, name: str, x: Tensor) -> Tensor:
        self.num_bytes[name] = self.num_bytes.get(name, 0) + x.nbytes
        return x


@dataclass
class Step:
    """Slices with the logits, masks and tokens that a step has, of the whole vocabulary."""

    slices: list[ReqSlice]
    logits_BV: Tensor
    masks_XW: Tensor
    token_pool_RL: Tensor


@dataclass
class Sampled:
    """What a rank has after a step."""

    tokens: list[int]
    token_pool: list[list[int]]
    logprobs: dict[int, TokenLogprobs]
    num_bytes: dict[str, int] = field(default_factory=dict)


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{}, {"temperature": 0.3}, {"temperature": 20.0}],
    "masked": [
        {"grammar": Grammar("regex", "a")},
        {"grammar": Grammar("regex", "a"), "temperature": 0.0},
        {},
    ],
    "biased": [{"logit_bias": {0: 3.0, 19: 4.0, 12: -50.0}}, {"min_tokens": 40}, {}],
    "penalized": [
        {"presence_penalty": 1.5, "temperature": 0.0},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.7},
        {},
    ],
    "logprobs": [{"logprobs": 3}, {"logprobs": 0, "temperature": 0.0}, {}],
    "filtered": [
        {"top_k": 4},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
        {},
        {"temperature": 0.0, "top_k": 3},
    ],
}
KINDS["all"] = [fields for each in KINDS.values() for fields in each] + [
    {"top_p": 0.6, "presence_penalty": 1.0, "grammar": Grammar("regex", "a"), "logprobs": 1},
    {"top_k": 5, "logit_bias": {1: 2.0}, "min_tokens": 40},
]
EXCHANGED = {
    "greedy": {"all_reduce_min"},
    "sampled": {"all_reduce_min"},
    "masked": {"all_reduce_min"},
    "biased": {"all_reduce_min"},
    "penalized": {"all_reduce_min"},
    "logprobs": {"all_reduce_min", "gather"},
    "filtered": {"all_reduce_min", "all_gather"},
    "all": {"all_reduce_min", "gather", "all_gather"},
}


def random_step(kind: str, vocab_size: int, dtype: torch.dtype, seed: int, copies: int = 2) -> Step:
    """A step of requests of one kind, whose logits have many ties."""
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    slices: list[ReqSlice] = []
    for row, fields in enumerate(KINDS[kind] * copies):
        end = source.randint(2, NUM_POSITIONS - 1)
        prompt = np.zeros(source.randint(1, end), dtype=np.int32)
        params = SamplingParams(**fields)
        req = Req(row, prompt, params, max_length=NUM_POSITIONS, seed=source.randrange(2**60))
        req.row = row
        slices.append(ReqSlice(req, end - 1, end, samples=True))
    num_rows = len(slices)
    num_words = -(-vocab_size // 32)
    is_allowed = torch.rand(num_rows, num_words * 32, generator=generator) < 0.3
    is_allowed[:, vocab_size // 2] = True  # or no token would be
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    words = (is_allowed.view(num_rows, num_words, 32) * weights).sum(dim=2)
    shape = (num_rows, NUM_POSITIONS)
    logits_BV = torch.randn(num_rows, vocab_size, generator=generator) * 3
    return Step(
        slices=slices,
        logits_BV=(logits_BV * 8).round().div(8).to(dtype),
        masks_XW=words.to(torch.uint32).view(torch.int32),
        token_pool_RL=torch.randint(vocab_size, shape, generator=generator).int(),
    )


def sample_on(comm: DistributedCommunicator, step: Step) -> Sampled:
    """What a rank of the group samples, from the logits of its tokens."""
    counting = CountingCommunicator(comm)
    vocab = VocabShard(step.logits_BV.shape[1], counting)
    token_pool_RL = step.token_pool_RL.clone()
    sampler = Sampler(vocab, token_pool_RL, frozenset({EOS_ID}), Staging(CPU))
    sampler.masks_XW[: len(step.masks_XW)] = step.masks_XW

    end_B = np.array([req_slice.end for req_slice in step.slices], dtype=np.int32)
    arrays = sampling_arrays(step.slices, end_B)
    index_B = torch.arange(len(end_B), dtype=torch.int32) * NUM_POSITIONS + torch.tensor(end_B)
    own = slice(vocab.tokens.start, vocab.tokens.stop)
    logits_BV = vocab.pad(step.logits_BV[:, own].clone())
    inputs = SamplingInputs(
        logits_BV,
        SamplingNumbers(*Staging(CPU).send(*arrays)),
        index_B,
        is_filtered=has_filters(arrays),
        is_masked=True,
    )
    sampled = sampler.sample_slices(step.slices, inputs, None)
    return Sampled(
        sampled.token_B.tolist(),
        token_pool_RL.tolist(),
        sampled.logprobs.read() if sampled.logprobs else {},
        counting.num_bytes,
    )


@pytest.mark.parametrize(("size", "vocab_size", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_choose_what_one_rank_chooses(
    kind: str, size: int, vocab_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    steps = [random_step(kind, vocab_size, dtype, seed) for seed in range(8)]
    expected = [sample_on(SingleCommunicator(), step) for step in steps]
    first, *others = in_group(
        size, tmp_path / "rendezvous", lambda comm: [sample_on(comm, step) for step in steps]
    )
    assert [step.tokens for step in first] == [step.tokens for step in expected]
    assert [step.token_pool for step in first] == [step.token_pool for step in expected]
    assert [step.logprobs for step in first] == [step.logprobs for step in expected]
    for of_rank in others:
        assert [step.tokens for step in of_rank] == [step.tokens for step in expected]
        assert [step.token_pool for step in of_rank] == [step.token_pool for step in expected]
        assert not any(step.logprobs for step in of_rank)


@pytest.mark.parametrize("kind", KINDS)
def test_only_filters_and_logprobs_exchange_logits(kind: str, tmp_path: Path) -> None:
    """All others exchange 8 bytes a request, and as much again if their logits are changed."""
    vocab_size = 2048
    step = random_step(kind, vocab_size, torch.float32, seed=0)
    num_requests = len(step.slices)
    for of_rank in in_group(2, tmp_path / "rendezvous", lambda comm: sample_on(comm, step)):
        num_bytes = of_rank.num_bytes
        assert num_bytes.keys() == EXCHANGED[kind]
        assert 8 * num_requests <= num_bytes["all_reduce_min"] <= 16 * num_requests
        if "gather" in num_bytes:
            num_scored = sum(s.req.params.logprobs is not None for s in step.slices)
            assert num_bytes["gather"] == num_scored * vocab_size // 2 * 4
