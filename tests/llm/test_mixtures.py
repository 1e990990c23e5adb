"""Requests of all kinds at once, aborted and retracted at random: each has one end and the answer it has alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.core import Grammar, SamplingParams
from minisgl.llm import LLM
from minisgl.message import AbortBackendMsg, DetokenizeMsg, UserMsg, pack_ids
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
    """Sends requests to an LLM's scheduler and files what is said of each."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._scheduler = llm._scheduler
        self._queues = llm._queues
        self._random = random.Random(seed)
        self.asked: list[tuple[int, list[int]]] = []  # kind and prompt, by uid
        self.news: list[list[DetokenizeMsg]] = []

    def send(self) -> None:
        kind, prompt = (
            self._random.randrange(len(KINDS)),
            ids_of(PROMPT) * self._random.choice([1, 2, 5, 9]),
        )
        params = replace(KINDS[kind], priority=self._random.choice([0, 0, 1, -1]))
        self._queues.put(UserMsg(len(self.asked), pack_ids(prompt), params))
        self.asked.append((kind, prompt))
        self.news.append([])

    def abort(self) -> None:
        self._queues.put(AbortBackendMsg(self._random.randrange(len(self.asked))))

    def step(self) -> None:
        if self._scheduler.is_idle and self._queues.is_inbox_empty:
            return
        self._scheduler.step()
        self._scheduler.check_integrity()
        for news in self._queues.take_outputs():
            said = self.news[news.uid]
            assert not (said and (said[-1].finish or said[-1].error)), (
                "something came after the end"
            )
            said.append(news)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(self._random.choice([0, 0, 1, 1, 2])):
                self.send()
            if self.asked and self._random.random() < 0.3:
                self.abort()
            self.step()
        while not self._scheduler.is_idle:
            self.step()


@pytest.mark.parametrize(
    "options", [{"overlap": True}, {"overlap": False}, {"overlap": True, "tp": 2}], ids=str
)
def test_each_of_a_crowd_has_one_end_and_its_own_answer(
    checkpoint: Callable[[str], Path], options: dict[str, int]
) -> None:
    with make(
        checkpoint(ARCH), max_running_requests=6, num_pages=60, max_prefill_length=13, **options
    ) as llm:
        crowd = Crowd(llm, seed=5)
        crowd.run(150)
        scheduler = llm._scheduler
        assert scheduler._counts.num_retractions > 0
        assert not (scheduler._live or scheduler._deferred or scheduler.grammars._matchers)
        answers: dict[tuple[int, int], list[int]] = {}
        for (kind, prompt), said in zip(crowd.asked, crowd.news, strict=True):
            assert bool(said[-1].error) == (kind == REFUSED and said[-1].finish != "abort")
            if said[-1].error or said[-1].finish == "abort":
                continue
            tokens = [token for news in said for token in news.tokens]
            assert answers.setdefault((kind, len(prompt)), tokens) == tokens
            of_prompt = [news.prompt_logprobs for news in said if news.prompt_logprobs is not None]
            assert [[token for token, _ in it] for it in of_prompt] == [prompt] * (
                KINDS[kind].prompt_logprobs is not None
            )
            assert sum(news.embedding is not None for news in said) == KINDS[kind].embeds
        assert {kind for kind, _ in answers} == set(range(len(KINDS))) - {REFUSED}
