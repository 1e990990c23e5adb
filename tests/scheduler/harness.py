"""A scheduler over a fake executor, stepped by hand; and what it answered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.config import SchedulerConfig
from minisgl.core import FinishReason, IntArray, SamplingParams, TokenLogprobs
from minisgl.engine import EngineLimits
from minisgl.message import (
    AbortMsg,
    DetokenizeMsg,
    EngineStats,
    ReplyError,
    SchedulerMsg,
    UserMsg,
    pack_ids,
)
from minisgl.scheduler import Scheduler
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from minisgl.scheduler.grammars.pending import PendingGrammars
from tests.scheduler.fake_executor import FakeExecutor, endless_answer, reference_answer
from tests.scheduler.fake_matchers import FakeMatchers

VOCAB_SIZE = 30
EOS = frozenset({0, 1})
MANY = 10_000


def make_limits(num_pages: int = 64, page_size: int = 4, max_seq_len: int = 64) -> EngineLimits:
    """Those of an engine; a `FakeExecutor` has a number of rows of its own."""
    return EngineLimits(
        page_size=page_size,
        max_seq_len=min(max_seq_len, num_pages * page_size),
        num_pages=num_pages,
        num_rows=1,
        vocab_size=VOCAB_SIZE,
        eos_ids=EOS,
        kv_bytes=0,
        is_pool_shorter=num_pages * page_size < max_seq_len,
    )


def exactly(num_tokens: int, priority: int = 0) -> SamplingParams:
    """An answer of this many tokens."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, priority=priority)


class MemoryInbox:
    """Hands out what was put in. A scheduler that would wait for more has a bug."""

    def __init__(self) -> None:
        self.msgs: list[SchedulerMsg] = []

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        if block:
            assert self.msgs, "the scheduler would wait forever"
        msgs, self.msgs = self.msgs, []
        return msgs

    def post(self, msg: SchedulerMsg) -> None:
        self.msgs.append(msg)


@dataclass
class Answer:
    """All that was said of one request. After its last message nothing may follow."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: ReplyError | None = None
    num_prompt: int = 0
    num_cached: int = 0
    prompt: list[tuple[int, TokenLogprobs | None]] | None = None
    embedding: bytes | None = None
    prompt_tail: list[int] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        return self.finish is not None or self.error is not None

    def take(self, msg: DetokenizeMsg) -> None:
        assert not self.is_final, f"{msg} came after the last message"
        if self.tokens:
            assert not msg.is_first, "it says that no tokens came before"
        self.tokens += msg.tokens
        self.finish = msg.finish
        self.error = msg.error
        self.num_prompt = msg.num_prompt
        self.num_cached = msg.num_cached
        self.prompt_tail += msg.prompt_tail
        if msg.prompt_logprobs is not None:
            assert self.prompt is None, "what is asked of a prompt is told once"
            self.prompt = msg.prompt_logprobs
        if msg.embedding is not None:
            assert self.embedding is None, "what is asked of a prompt is told once"
            self.embedding = msg.embedding


class AnswerBook:
    """An outbox that files messages by uid."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.stats: list[EngineStats] = []
        self.lives: list[int] = []  # of the detokenizers that it was redirected to

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        assert len(msgs) + bool(stats) > 0, "it says nothing"
        self.stats += [stats] if stats else []
        for msg in msgs:
            self.answers.setdefault(msg.uid, Answer()).take(msg)

    def redirect(self, life: int) -> None:
        self.lives.append(life)


class Host:
    """One scheduler. Each step checks who owns what, and spoils the KV of pages that are free."""

    def __init__(
        self,
        limits: EngineLimits | None = None,
        *,
        num_rows: int = 8,
        asynchronous: bool = True,
        executor_type: type[FakeExecutor] = FakeExecutor,
        **options: Any,
    ) -> None:
        self.limits = limits or make_limits()
        self.executor = executor_type(self.limits, num_rows, asynchronous=asynchronous)
        self.inbox = MemoryInbox()
        self._book = AnswerBook()
        config = SchedulerConfig(
            **{
                "overlap": True,
                "seed": 0,
                "max_prefill_length": 8192,
                "target_itl_ms": 0,  # nothing depends on a clock
                **options,
            }
        )
        self.scheduler = Scheduler(config, self.executor, self.inbox, self._book)
        self.matchers = FakeMatchers(self._endless_answer)
        self.use_matchers(self.matchers, self.scheduler.pending_grammars)
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self._uids = itertools.count()

    def use_matchers(self, matchers: GrammarMatchers, pending: PendingGrammars) -> None:
        """Put them in the place of the scheduler's."""
        scheduler = self.scheduler
        scheduler.grammars = matchers
        scheduler.requests._grammars = matchers
        scheduler.outputs._grammar_progress._grammars = matchers
        scheduler.pending_grammars = pending
        scheduler.requests._pending_grammars = pending
        scheduler.statistics._pending_grammars = pending

    @property
    def is_busy(self) -> bool:
        return bool(self.inbox.msgs) or not self.scheduler.is_idle

    @property
    def free_pages(self) -> IntArray:
        cache = self.scheduler.cache
        return cache._free[: cache._num_free]

    def submit(self, prompt: list[int], params: SamplingParams | None = None) -> int:
        uid = next(self._uids)
        self.asked[uid] = (prompt, params or SamplingParams())
        self.inbox.msgs.append(UserMsg(uid, pack_ids(prompt), self.asked[uid][1]))
        return uid

    def _endless_answer(self, uid: int) -> list[int]:
        prompt, _ = self.asked[uid]
        answer = endless_answer(prompt, self.limits.max_seq_len, self.limits.vocab_size)
        return answer[len(prompt) :]

    def abort(self, uid: int) -> None:
        self.inbox.msgs.append(AbortMsg(uid))

    def answer(self, uid: int) -> Answer:
        return self._book.answers.get(uid, Answer())

    @property
    def stats(self) -> list[EngineStats]:
        """All that was said of how the scheduler stands."""
        return self._book.stats

    @property
    def lives(self) -> list[int]:
        """Of the detokenizers that outputs were redirected to."""
        return self._book.lives

    @property
    def open_uids(self) -> list[int]:
        return [uid for uid in self.asked if not self.answer(uid).is_final]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.step()
            self.scheduler.check_integrity()
            self.executor.forget(self.free_pages)

    def drain(self, max_steps: int = MANY) -> int:
        """Step until there is nothing to do; the number of steps it took."""
        for num_steps in range(max_steps):
            if not self.is_busy:
                self.check_nothing_is_left()
                return num_steps
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler.requests._live}")

    def ask(self, prompt: list[int], params: SamplingParams | None = None) -> Answer:
        """One request, alone, to its end."""
        uid = self.submit(prompt, params)
        self.drain()
        return self.answer(uid)

    def check_answers(self) -> None:
        """Every request has its answer, or the beginning of it if it was aborted.

        Errors are left to the caller.
        """
        for uid, (prompt, params) in self.asked.items():
            answer = self.answer(uid)
            assert answer.is_final, f"uid {uid} has no last message"
            if answer.error:
                continue
            tokens, finish = reference_answer(prompt, params, self.limits)
            if answer.finish == "abort":
                assert answer.tokens == tokens[: len(answer.tokens)], f"uid {uid}"
            else:
                assert (answer.tokens, answer.finish) == (tokens, finish), f"uid {uid}"
                assert answer.prompt_tail == prompt[-4:], f"uid {uid}"
                scores = [
                    (token, TokenLogprobs(float(token), [(i, 0.0)]))
                    for i, token in enumerate(prompt)
                ]
                scored = (
                    None if params.prompt_logprobs is None else [(prompt[0], None), *scores[1:]]
                )
                assert answer.prompt == scored, f"uid {uid}"
                assert answer.embedding == (bytes([len(prompt)]) if params.embeds else None), (
                    f"uid {uid}"
                )

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        cache = scheduler.cache
        assert not scheduler.requests._live
        assert not scheduler.requests._deferred
        assert not scheduler._in_flight
        assert not scheduler.outputs.has_messages
        assert self.matchers.num_open == 0
        assert scheduler.prefill.num_waiting == len(scheduler.decode) == len(cache._held) == 0
        assert not scheduler.prefill.partly_computed
        assert cache.num_available == self.limits.num_pages, "a page is neither free nor evictable"
        scheduler.table.check_integrity(rows_in_use=[])
