"""Requests of all kinds at once, with random parameters, aborted and retracted at random.

Each has one end, and the answer that it has alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import Grammar, SamplingParams, TokenLogprobs
from minisgl.llm import LLM, GenerationOutput
from minisgl.message import AbortMsg, DetokenizeMsg, UserMsg, pack_ids
from tests.checkpoints import CONTEXT, VOCAB_SIZE
from tests.llm.test_grammar import PERSON, PROMPT
from tests.llm.test_llm import ARCH, ids_of, make

KINDS = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=80, seed=1, grammar=Grammar("json_schema", json.dumps(PERSON))),
    SamplingParams(
        max_tokens=30,
        seed=2,
        grammar=Grammar("regex", "[a-z ]{5,30}"),
        ignore_eos=True,
        min_tokens=6,
    ),
    SamplingParams(max_tokens=9, grammar=Grammar("regex", "(")),
    SamplingParams(
        max_tokens=5,
        temperature=0.0,
        grammar=Grammar("regex", "[a-c]+"),
        prompt_logprobs=2,
        logprobs=1,
    ),
    SamplingParams(max_tokens=0, prompt_logprobs=0),
    SamplingParams(max_tokens=0, embeds=True),
]
REFUSED = 3


class Crowd:
    """Sends requests to an LLM's scheduler and files the outputs of each."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._scheduler = llm._ranks.scheduler
        self._queues = llm._ranks._queues
        self._random = random.Random(seed)
        self.requests: list[tuple[int, list[int]]] = []  # kind and prompt, by uid
        self.outputs: list[list[DetokenizeMsg]] = []

    def send(self) -> None:
        kind = self._random.randrange(len(KINDS))
        prompt = ids_of(PROMPT) * self._random.choice([1, 2, 5, 9])
        params = replace(KINDS[kind], priority=self._random.choice([0, 0, 1, -1]))
        self._queues.post(UserMsg(len(self.requests), pack_ids(prompt), params))
        self.requests.append((kind, prompt))
        self.outputs.append([])

    def abort(self) -> None:
        self._queues.post(AbortMsg(self._random.randrange(len(self.requests))))

    def step(self) -> None:
        if self._scheduler.is_idle and self._queues._to_scheduler.empty():
            return
        self._scheduler.step()
        self._scheduler.check_integrity()
        for output in self._queues.drain_outputs():
            before = self.outputs[output.uid]
            if before:
                assert before[-1].finish is None, "an output after the end"
                assert before[-1].error is None, "an output after the end"
            before.append(output)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(self._random.choice([0, 0, 1, 1, 2])):
                self.send()
            if self.requests and self._random.random() < 0.3:
                self.abort()
            self.step()
        while self._scheduler.requests._live or not self._scheduler.is_idle:
            self.step()


@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False}], ids=str)
def test_each_of_a_crowd_has_one_end_and_its_own_answer(
    checkpoint: Callable[[str], Path], options: dict[str, int]
) -> None:
    with make(
        checkpoint(ARCH), max_running_requests=6, num_pages=60, max_prefill_length=13, **options
    ) as llm:
        for kind, params in enumerate(KINDS):  # after it no request waits for its grammar
            if kind != REFUSED:
                llm.generate(PROMPT, params, use_tqdm=False)
        crowd = Crowd(llm, seed=5)
        crowd.run(150)
        scheduler = llm._ranks.scheduler
        assert scheduler.statistics.counts.num_retractions > 0
        assert not (scheduler.requests._live or scheduler.requests._deferred)
        assert not scheduler.grammars._matches
        answers: dict[tuple[int, int], list[int]] = {}
        for (kind, prompt), outputs in zip(crowd.requests, crowd.outputs, strict=True):
            last = outputs[-1]
            assert bool(last.error) == (kind == REFUSED and last.finish != "abort")
            if last.error or last.finish == "abort":
                continue
            tokens = [token for output in outputs for token in output.tokens]
            assert answers.setdefault((kind, len(prompt)), tokens) == tokens
            scored = [out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None]
            scored_prompts = [[token for token, _ in entries] for entries in scored]
            scores_prompt = KINDS[kind].prompt_logprobs is not None
            assert scored_prompts == [prompt] * scores_prompt
            embeddings = [output for output in outputs if output.embedding is not None]
            assert len(embeddings) == KINDS[kind].embeds
        assert {kind for kind, _ in answers} == set(range(len(KINDS))) - {REFUSED}


GRAMMARS = [
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("regex", "the quick brown fox|the lazy dog jumps over"),
    Grammar("regex", "(ab)*"),
]
STOPS = ["e", "th", "o ", "x", "dog", "qu", "\n", "<s>"]
NUMBERS_TOLERANCE = 1e-3


def random_prompt(chance: random.Random) -> list[int]:
    """The beginning of one of two texts, so that prompts have prefixes in common; or any tokens."""
    text = chance.choice([PROMPT * 3, "abab " * 30])
    ids = ids_of(text)[: chance.choice([1, 3, 10, 40, 100])]
    return ids + chance.choices(range(VOCAB_SIZE), k=chance.choice([0, 0, 0, 1, 7]))


def random_params(chance: random.Random) -> SamplingParams:
    max_tokens = chance.choice([None, None, 0, 1, 2, 5, 12, 40, 40])
    most = CONTEXT if max_tokens is None else max_tokens
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(chance.choice([0, 0, 1, 3, 10]), most),
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.0, 3.0]),
        "seed": chance.randrange(5),
        "top_k": chance.choice([None, None, 1, 5, 40]),
        "top_p": chance.choice([1.0, 1.0, 0.9, 0.3]),
        "min_p": chance.choice([0.0, 0.0, 0.05]),
        "ignore_eos": chance.random() < 0.5,
        "priority": chance.choice([0, 0, 0, -2, 5]),
        "cache_salt": chance.choice([None, None, "a", "b"]),
        "logprobs": chance.choice([None, None, 0, 3]),
        "prompt_logprobs": chance.choice([None, None, None, 0, 2]),
        "include_stop_str_in_output": chance.random() < 0.3,
        "skip_special_tokens": chance.random() < 0.7,
    }
    some = {
        "stop": tuple(chance.sample(STOPS, chance.choice([1, 2, 3]))),
        "stop_token_ids": tuple(chance.sample(range(VOCAB_SIZE), chance.choice([1, 5, 20]))),
        "presence_penalty": chance.choice([-1.5, 1.0, 2.0]),
        "frequency_penalty": chance.choice([-0.5, 1.0]),
        "repetition_penalty": chance.choice([0.5, 1.3, 10.0]),
        "logit_bias": {chance.randrange(VOCAB_SIZE): chance.choice([-100.0, 5.0, 100.0])},
        "grammar": chance.choice(GRAMMARS),
    }
    fields |= {name: value for name, value in some.items() if chance.random() < 0.3}
    return SamplingParams(**fields)


def numbers_of(entries: list[TokenLogprobs] | list[TokenLogprobs | None] | None) -> list[float]:
    """All log probabilities, in order."""
    given = [entry for entry in entries or () if entry is not None]
    return [number for entry in given for number in (entry.logprob, *(n for _, n in entry.top))]


def assert_equal_answers(answer: GenerationOutput, alone: GenerationOutput) -> None:
    assert answer.token_ids == alone.token_ids
    assert (answer.text, answer.finish_reason) == (alone.text, alone.finish_reason)
    for one, other in (
        (answer.logprobs, alone.logprobs),
        (answer.prompt_logprobs, alone.prompt_logprobs),
    ):
        assert (one is None) == (other is None)
        assert numbers_of(one) == pytest.approx(numbers_of(other), abs=NUMBERS_TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_with_any_parameters_and_options_each_has_the_answer_that_it_has_alone(
    checkpoint: Callable[[str], Path], seed: int
) -> None:
    chance = random.Random(seed)
    folder = checkpoint(ARCH)
    num_retractions = 0
    plain = {"cache": "naive", "overlap": False, "page_size": 1, "num_pages": CONTEXT}
    with make(folder, **plain, max_running_requests=1) as lonely:
        for page_size in (1, 4, 16):
            options = {
                "page_size": page_size,
                "num_pages": -(-CONTEXT // page_size) + chance.choice([0, 1]),
                "overlap": chance.random() < 0.6,
                "cache": chance.choice(["radix", "radix", "naive"]),
                "schedule": chance.choice(["fcfs", "short-first"]),
                "max_prefill_length": chance.choice([5, 17, 64, 8192]),
                "max_running_requests": chance.choice([2, 8, 16]),
            }
            with make(folder, **options) as llm:
                prompts = [random_prompt(chance) for _ in range(20)]
                params_list = [random_params(chance) for _ in prompts]
                answers = llm.generate(prompts, params_list, use_tqdm=False)
                scheduler = llm._ranks.scheduler
                scheduler.check_integrity()
                num_retractions += scheduler.statistics.counts.num_retractions
            for prompt, params, answer in zip(prompts, params_list, answers, strict=True):
                alone = replace(params, priority=0, cache_salt=None)
                [expected] = lonely.generate([prompt], alone, use_tqdm=False)
                assert_equal_answers(answer, expected)
    assert num_retractions > 0
