"""What an eager step computes of a plan, padding included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.torch_backend import TorchAttentionBackend, TorchAttnMetadata
from minisgl.core import BatchPlan, Req, ReqSlice, SamplingParams
from minisgl.engine import model_runner
from minisgl.engine.batch_builder import EagerPadding
from tests.checkpoints import VOCAB_SIZE
from tests.engine.harness import Host, WatchedEngine, config_of, greedy, random_prompts

PADDING_ROW = 9


def req_slice(row: int, start: int, end: int) -> ReqSlice:
    req = Req(row, np.zeros(1, dtype=np.int32), SamplingParams(), max_length=2, seed=0)
    req.row = row
    return ReqSlice(req, start, end, samples=True)


@pytest.mark.parametrize(
    ("num_tokens", "padded"), [(255, 255), (256, 256), (257, 320), (320, 320), (8193, 8256)]
)
def test_a_long_step_has_a_multiple_of_64_tokens(num_tokens: int, padded: int) -> None:
    padding = EagerPadding(PADDING_ROW, multiple=64, longest=100)
    plan = padding.pad(BatchPlan([req_slice(3, 0, 1), req_slice(4, 7, 6 + num_tokens)]))
    assert plan.num_tokens == padding.padded(num_tokens) == padded


def test_padding_is_a_slice_of_the_padding_row_that_returns_nothing() -> None:
    padding = EagerPadding(PADDING_ROW, multiple=64, longest=100)
    plan = padding.pad(BatchPlan([req_slice(3, 10, 310)]))
    last = plan.slices[-1]
    assert (last.row, last.start, last.end) == (PADDING_ROW, 0, 20)
    assert (last.samples, plan.num_returned(last)) == (False, 0)


def test_decodes_alone_are_not_padded() -> None:
    padding = EagerPadding(PADDING_ROW, multiple=64, longest=100)
    decodes = [req_slice(row, 7, 8) for row in range(300)]
    assert padding.pad(BatchPlan(decodes)).num_tokens == 300


def test_padding_does_not_end_behind_its_row() -> None:
    padding = EagerPadding(PADDING_ROW, multiple=64, longest=10)
    assert padding.pad(BatchPlan([req_slice(3, 0, 300)])).num_tokens == 300
    assert padding.pad(BatchPlan([req_slice(3, 0, 311)])).num_tokens == 320


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_padded_steps_give_the_same_answers(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    prompts = random_prompts([150, 33, 140, 200], VOCAB_SIZE)
    params = [greedy(8), greedy(8), greedy(8), SamplingParams(max_tokens=1, prompt_logprobs=2)]

    sizes: list[int] = []
    make_metadata = TorchAttentionBackend.make_metadata

    def watched(backend: TorchAttentionBackend, plan: BatchPlan) -> TorchAttnMetadata:
        sizes.append(plan.num_tokens)
        return make_metadata(backend, plan)

    monkeypatch.setattr(TorchAttentionBackend, "make_metadata", watched)

    def outputs(multiple: int) -> tuple[list[list[int]], list[float]]:
        """Tokens, and log probabilities of the last prompt."""
        monkeypatch.setattr(model_runner, "eager_multiple", lambda device: multiple)
        config = config_of(checkpoint(arch), max_prefill_length=300)
        engine = WatchedEngine(config)
        try:
            host = Host(engine, config)
            tokens = [answer.tokens for answer in host.ask(prompts, params)]
            of_prompt = [
                entry.logprob
                for msg in host.outbox.msgs
                for _, entry in msg.prompt_logprobs or []
                if entry is not None
            ]
            return tokens, of_prompt
        finally:
            engine.close()

    padded_tokens, padded_logprobs = outputs(64)
    assert 320 in sizes
    sizes.clear()
    tokens, logprobs = outputs(1)
    assert 300 in sizes
    assert padded_tokens == tokens
    assert len(logprobs) == len(prompts[-1]) - 1
    assert padded_logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("lengths", "is_scored", "in_last_layer"),
    [([5, 9], False, [2]), ([5, 9], True, [14]), ([20, 5], False, [1, 1]), ([30], False, [1, 1])],
    ids=["one step", "a scored prompt", "a chunk beside a prompt", "nothing but a chunk"],
)
def test_in_the_last_layer_only_what_is_returned_attends(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    is_scored: bool,
    in_last_layer: list[int],
) -> None:
    num_queries: list[list[int]] = []
    forward = TorchAttentionBackend.forward

    def watched(
        backend: TorchAttentionBackend, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *rest: Any
    ) -> Tensor:
        layer, queries = rest
        assert queries.row_X.dtype == queries.position_X.dtype == torch.int32
        assert len(queries.row_X) == len(queries.position_X) == len(q_TNH)
        num_queries[layer].append(len(q_TNH))
        return forward(backend, q_TNH, k_TKH, v_TKH, *rest)

    monkeypatch.setattr(TorchAttentionBackend, "forward", watched)
    config = config_of(checkpoint("qwen3"), max_prefill_length=16, cuda_graph_max_bs=0)
    engine = WatchedEngine(config)
    try:
        num_queries += [[] for _ in range(engine.context.kv_pool.num_layers)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0 if is_scored else None)
        Host(engine, config).ask(random_prompts(lengths, VOCAB_SIZE), [params] * len(lengths))
    finally:
        engine.close()
    *others, last = num_queries
    assert last == in_last_layer
    assert {sum(counts) for counts in others} == {sum(lengths)}
