"""Prompt logprobs and embeddings are transformers', however the prompt was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.engine import prompt_outputs
from minisgl.llm import LLM
from tests.checkpoints import CONTEXT, VOCAB_SIZE, tiny_model
from tests.engine.harness import random_prompts
from tests.llm.test_llm import ARCH, make

KINDS: dict[str, dict[str, Any]] = {
    "in turn": {"overlap": False},
    "overlapping, in chunks": {"overlap": True, "max_prefill_length": 7},
    "short of pages": {
        "overlap": True,
        "max_prefill_length": 7,
        "num_pages": 24,
        "max_seq_len": 96,
        "cache": "naive",
    },
    "on a GPU": {"device": "cuda", "attn": "torch", "max_prefill_length": 7},
}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = [1, 2, 7, 8, 9, 50]


@pytest.fixture(scope="module", params=[*list(KINDS)[:-1], pytest.param("on a GPU", marks=ON_GPU)])
def llm(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with make(checkpoint(ARCH), **KINDS[request.param]) as llm:
        yield llm


@torch.no_grad()
def reference(prompt: list[int]) -> torch.Tensor:
    """logprob_TV: what transformers predicts after each token."""
    return torch.log_softmax(tiny_model(ARCH)(torch.tensor([prompt])).logits[0].float(), dim=-1)


def check(prompt: list[int], entries: list[TokenLogprobs | None] | None, num_top: int) -> None:
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(prompt)
    logprob_TV = reference(prompt)
    for i, entry in enumerate(entries[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(logprob_TV[i, prompt[i + 1]]), abs=1e-3)
        top, ids = logprob_TV[i].topk(num_top)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.tolist(), abs=1e-3)


@pytest.mark.parametrize("max_tokens", [0, 20])
def test_log_probabilities_of_prompts_are_transformers(llm: LLM, max_tokens: int) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE)
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True
    )
    for _ in range(2):  # the second time, all of it could have come from the cache
        outs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, out in zip(prompts, outs, strict=True):
            assert (len(out.token_ids), out.finish_reason, out.num_cached) == (
                max_tokens,
                "length",
                0,
            )
            check(prompt, out.prompt_logprobs, num_top=2)
    llm._ranks.scheduler.check_integrity()
    if max_tokens and llm._ranks.scheduler.cache.num_pages == 24:
        assert llm._ranks.scheduler.statistics.counts.num_retractions > 0


def test_who_asks_changes_nothing_for_others_and_gets_the_same_answer(llm: LLM) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=1)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    asking = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    alone = [out.token_ids for out in llm.generate(prompts, plain, use_tqdm=False)]
    each = [asking if i % 2 else plain for i in range(len(prompts))]
    mixed = llm.generate(prompts, each, use_tqdm=False)
    assert [out.token_ids for out in mixed] == alone
    for prompt, out, params in zip(prompts, mixed, each, strict=True):
        assert out.logprobs is not None
        assert len(out.logprobs) == 12
        if params is asking:
            check(prompt, out.prompt_logprobs, num_top=0)
        else:
            assert out.prompt_logprobs is None


def test_an_answer_without_tokens_has_no_log_probabilities(llm: LLM) -> None:
    """What is sampled after the prompt is dropped, and with it what was measured of it."""
    prompts = random_prompts([1, 30], VOCAB_SIZE, seed=6)
    params = SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1)
    for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert (out.token_ids, out.logprobs) == ([], [])
        check(prompt, out.prompt_logprobs, num_top=1)


def test_more_rows_than_are_made_logits_at_a_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_outputs, "_MAX_SCORED_ROWS", 3)
    [prompt] = random_prompts([26], VOCAB_SIZE, seed=2)
    [out] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    check(prompt, out.prompt_logprobs, num_top=1)


def test_a_prompt_alone_may_fill_the_context_but_for_a_token(llm: LLM) -> None:
    limit = min(CONTEXT, llm._ranks.scheduler._executor.limits.max_seq_len)
    [prompt] = random_prompts([limit - 1], VOCAB_SIZE, seed=3)
    [out] = llm.generate([prompt], SamplingParams(max_tokens=0), use_tqdm=False)
    assert (out.text, out.token_ids, out.finish_reason, out.num_prompt) == (
        "",
        [],
        "length",
        limit - 1,
    )


@torch.no_grad()
def vector_of(prompt: list[int]) -> torch.Tensor:
    """What transformers has for the last token after the final norm, at length 1."""
    hidden_TD = tiny_model(ARCH).model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden_TD[-1] / hidden_TD[-1].norm()


def check_embeddings(prompts: list[list[int]], vectors: list[Any]) -> None:
    assert len(vectors) == len(prompts)
    for prompt, vector in zip(prompts, vectors, strict=True):
        assert vector == pytest.approx(vector_of(prompt).numpy(), abs=1e-4)


def test_an_embedding_is_the_last_hidden_state_of_transformers(llm: LLM) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=5)
    for _ in range(2):  # the second time, all but the last page comes from the cache
        vectors = llm.embed(prompts)
        check_embeddings(prompts, vectors)
        vectors[0] /= 2.0  # they are the caller's
    assert llm._ranks.scheduler.is_idle


def test_a_prompt_may_have_a_vector_and_an_answer(llm: LLM) -> None:
    """Also where a request that was retracted computes its prompt once more, in whole chunks."""
    prompts = random_prompts([28, 21, 14, 7, 7, 14], VOCAB_SIZE, seed=6)
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [out.token_ids for out in llm.generate(prompts, plain, use_tqdm=False)]
    each = [
        replace(plain, embeds=True, prompt_logprobs=0 if i % 2 else None)
        for i in range(len(prompts))
    ]
    vectors: dict[int, Any] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, output, _ in llm._run(list(prompts), each, wants_text=False):
        tokens[index] += output.tokens
        if output.embedding:
            vectors[index] = np.frombuffer(output.embedding, "<f4")
    assert tokens == expected
    check_embeddings(prompts, [vectors[index] for index in range(len(prompts))])


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_answer_and_a_stream_have_the_vector_that_was_asked_for(
    llm: LLM, max_tokens: int
) -> None:
    prompts = random_prompts([7, 5], VOCAB_SIZE, seed=7)
    plain = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    each = [replace(plain, embeds=True), plain]
    answer, other = llm.generate(prompts, each, use_tqdm=False)
    assert other.embedding is None
    outputs = [output for output in llm.stream(prompts, each) if output.embedding is not None]
    assert [output.index for output in outputs] == [0]
    check_embeddings(prompts[:1], [answer.embedding])
    check_embeddings(prompts[:1], [outputs[0].embedding])


def test_ranks_work_together(checkpoint: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=4)
    with make(checkpoint(ARCH), tp=2, overlap=True, max_prefill_length=7) as llm:
        check_embeddings(prompts, llm.embed(prompts))
        outs = llm.generate(
            prompts, SamplingParams(max_tokens=3, prompt_logprobs=2), use_tqdm=False
        )
    for prompt, out in zip(prompts, outs, strict=True):
        check(prompt, out.prompt_logprobs, num_top=2)
