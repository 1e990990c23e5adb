"""Requests of all kinds at once, aborted and retracted at random.

Each has one end, and the answer that it has alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.core import Grammar, SamplingParams
from minisgl.llm import LLM
from minisgl.message import AbortRequestMsg, DetokenizeMsg, UserMsg, pack_ids
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
        self._queues.post(AbortRequestMsg(self._random.randrange(len(self.requests))))

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
