"""Thousands of random steps: KV and tokens stay right, whatever arrives, ends or runs short."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from minisgl.config import SCHEDULE_NAMES
from minisgl.core import Grammar, SamplingParams
from minisgl.kvcache import radix_cache
from minisgl.scheduler import prefix_groups
from tests.scheduler.fake_executor import reference_answer
from tests.scheduler.harness import VOCAB_SIZE, Host, make_limits
from tests.scheduler.script import Script

NUM_STEPS = 80
MAX_OPEN = 10
UNKNOWN_UID = 10**9
HUGE = 100_000


@dataclass
class RandomClient:
    """Sends requests that share prefixes, and aborts some of them."""

    host: Host
    random: Random
    texts: list[list[int]] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    def act(self) -> None:
        chance = self.random.random()
        if chance < 0.06:
            self._abort()
        elif chance < 0.1:
            self._submit_impossible()
        elif chance < 0.6 and len(self.host.open_uids) < MAX_OPEN:
            self._submit()

    def _submit(self) -> None:
        prompt = self._prompt()
        for _ in range(self.random.choice([1, 1, 2, 3])):  # one prompt several times in one step
            uid = self.host.submit(prompt, self._params(len(prompt)))
            if self.random.random() < 0.05:
                self.host.abort(uid)
                self.aborted.add(uid)
        self.texts.append(prompt + reference_answer(prompt, SamplingParams(), self.host.limits)[0])

    def _prompt(self) -> list[int]:
        """The beginning of an earlier prompt and answer, and something new."""
        limit = self.host.limits.max_seq_len - 1
        known = self.random.choice(self.texts) if self.texts else []
        known = known[
            : self.random.randint(0, self.random.choice([0, limit // 4, limit // 2, limit]))
        ]
        room = limit - len(known)
        num_new = min(room, self.random.choice([0, 1, 2, 3, 5, 8, room])) or (not known)
        return known + self.random.choices(range(VOCAB_SIZE), k=num_new)

    def _params(self, num_prompt: int) -> SamplingParams:
        room = self.host.limits.max_seq_len - num_prompt
        max_tokens = self.random.choice([None, self.random.randint(0, room), room])
        priority = self.random.choice([0, 0, 0, -1, 3])
        return SamplingParams(
            max_tokens,
            ignore_eos=self.random.random() < 0.7,
            priority=priority,
            prompt_logprobs=1 if self.random.random() < 0.2 else None,
            embeds=self.random.random() < 0.1,
            cache_salt=self.random.choice([None, None, "a", "b"]),
            grammar=self._grammar(room) if self.random.random() < 0.4 else None,
            stop_token_ids=self.random.choice([(), (), (5,), (6, 7)]),
        )

    def _grammar(self, room: int) -> Grammar:
        runs = self.random.choice([(0,), (0, 0, 4), (2, 3, 9), (30,)])
        return Script(self.random.randint(1, room), self.random.randint(0, 9), runs).grammar

    def _abort(self) -> None:
        uid = self.random.choice([*self.host.asked, *self.host.open_uids[:3] * 10, UNKNOWN_UID])
        self.host.abort(uid)
        if uid in self.host.open_uids:
            self.aborted.add(uid)

    def _submit_impossible(self) -> None:
        too_long = [2] * (self.host.limits.max_seq_len + self.random.choice([0, 1, 1000]))
        self.refused.add(
            self.host.submit(self.random.choice([[], too_long, [VOCAB_SIZE], [3, -1]]))
        )

    def check_finishes(self) -> None:
        """Each request that was neither aborted nor impossible came to a proper end."""
        for uid in self.host.asked:
            answer = self.host.answer(uid)
            assert (answer.error is not None) == (uid in self.refused), f"uid {uid}: {answer.error}"
            if answer.finish == "abort":
                assert uid in self.aborted


def _random_host(random: Random, page_size: int, **options: object) -> Host:
    """Often with hardly more memory than one request may need."""
    max_seq_len = random.choice([9, 24, 40, 64])
    num_pages = -(-max_seq_len // page_size) + random.choice([0, 0, 1, 2, 5, 100])
    limits = make_limits(num_pages, page_size, max_seq_len)
    return Host(
        limits, num_rows=random.choice([1, 3, 5, 16]), asynchronous=random.random() < 0.7, **options
    )


@pytest.fixture
def few_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that share a prefix are a group, as there are few requests here."""
    monkeypatch.setattr(prefix_groups, "_LEAST_BYTES", -(10**15))
    for module in (radix_cache, prefix_groups):
        monkeypatch.setattr(module, "FEWEST_IN_GROUP", 2)


@pytest.mark.usefixtures("few_share")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("max_prefill_length", [1, 7, 64, HUGE])
def test_every_request_gets_its_tokens_and_one_end(
    overlap: bool, cache: str, page_size: int, max_prefill_length: int
) -> None:
    for seed in range(3):
        random = Random(f"{overlap} {cache} {page_size} {max_prefill_length} {seed}")
        host = _random_host(
            random,
            page_size,
            overlap=overlap,
            cache=cache,
            schedule=SCHEDULE_NAMES[seed % len(SCHEDULE_NAMES)],
            max_prefill_length=max_prefill_length,
        )
        client = RandomClient(host, random)
        for _ in range(NUM_STEPS):
            client.act()
            if host.is_busy:
                host.step()
        num_slices_for_a_prompt = 2 + host.limits.max_seq_len // max_prefill_length
        host.drain(
            max_steps=100 + len(host.open_uids) * host.limits.max_seq_len * num_slices_for_a_prompt
        )
        host.check_answers()
        client.check_finishes()
        if cache == "naive":
            assert host.executor.num_grouped == 0
