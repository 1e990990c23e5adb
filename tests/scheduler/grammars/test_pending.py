"""Requests wait for their grammar, and steps do not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import SchedulerConfig
from minisgl.core import Grammar, SamplingParams
from minisgl.errors import EngineFailed, InvalidRequest
from minisgl.grammar import (
    GrammarCompiler,
    GrammarModel,
    GrammarTrials,
    Trial,
    Verdict,
    refusal,
)
from minisgl.message import ExitMsg, GrammarCompiledMsg, GrammarVerdictMsg, ReplyError
from minisgl.scheduler.grammars.known import KnownGrammars
from minisgl.scheduler.grammars.pending import GrammarTools, PendingGrammars
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.scheduler.fake_matchers import FakeMatchers
from tests.scheduler.harness import Host, exactly
from tests.scheduler.script import Script
from tests.scheduler.test_scheduler import prompt_of

LONG = 40
ACCEPTED = GrammarVerdictMsg(0, num_bytes=1)


class FakeTrials:
    """Remembers what is tried; the test gives the verdicts."""

    def __init__(self) -> None:
        self.tried: list[Grammar] = []
        self.cancelled: list[int] = []
        self.is_closed = False

    def start(self, grammar: Grammar, report: Any) -> Trial:
        self.tried.append(grammar)
        return Trial(len(self.tried) - 1, grammar, report)

    def cancel(self, trial: Trial) -> None:
        self.cancelled.append(trial.number)

    def close(self) -> None:
        self.is_closed = True


class FakeMatcher:
    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher()


class FakeCompiler:
    def compile(self, grammar: Grammar) -> FakeMatcher:
        return FakeMatcher()


class FailingCompiler:
    """Fails at what its trial could do."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def compile(self, grammar: Grammar) -> FakeMatcher:
        raise self.error


class PanicException(BaseException):
    """What a library written in Rust raises when it gives up."""


class LearningMatchers(FakeMatchers):
    """Scripts, of which only those that were tried are known."""

    def __init__(self, answer_of: Any) -> None:
        super().__init__(answer_of)
        self.known = KnownGrammars()

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self.known

    def open(self, uid: int, grammar: Grammar) -> None:
        self.known.open(grammar)
        super().open(uid, grammar)


class GrammarHost(Host):
    """A scheduler whose grammars are on trial until the test says more."""

    def __init__(self, *, leads: bool = True) -> None:
        super().__init__()
        self.trials = FakeTrials()
        self.matchers = LearningMatchers(self._endless_answer)
        tools = GrammarTools(
            FakeCompiler(),  # type: ignore[arg-type]
            self.trials if leads else None,  # type: ignore[arg-type]
            num_matchers=3,
        )
        pending = PendingGrammars(self.matchers.known, tools, self.inbox.post)
        self.use_matchers(self.matchers, pending)

    def post_verdict(self, verdict: GrammarVerdictMsg) -> None:
        """Step with a verdict; the grammar is compiled when this returns."""
        self.inbox.post(verdict)
        self.step()
        for pending in self.scheduler.pending_grammars._pending.values():
            for future in pending.compiled:
                future.result()


def guided(num_tokens: int = 8, seed: int = 0) -> SamplingParams:
    script = Script(num_tokens, seed)
    return SamplingParams(ignore_eos=True, grammar=script.grammar)


def test_others_are_computed_while_a_grammar_is_tried_and_compiled() -> None:
    host = GrammarHost()
    neighbour = host.submit(prompt_of(4), exactly(LONG))
    waiting = host.submit(prompt_of(5), guided())
    host.step(10)
    assert len(host.answer(neighbour).tokens) >= 8
    assert host.stats[-1].num_waiting == 1

    host.post_verdict(ACCEPTED)
    host.drain()
    host.check_answers()
    assert (len(host.answer(waiting).tokens), host.answer(waiting).finish) == (8, "stop")


def test_a_scheduler_whose_requests_all_wait_is_idle() -> None:
    host = GrammarHost()
    host.submit(prompt_of(5), guided())
    host.step()
    assert host.scheduler.is_idle
    host.post_verdict(ACCEPTED)
    host.step()
    assert not host.scheduler.is_idle
    host.drain()


def test_equal_grammars_share_a_trial_and_later_ones_need_none() -> None:
    host = GrammarHost()
    for salt in range(3):
        host.submit(prompt_of(5, salt), guided())
    host.step()
    host.post_verdict(ACCEPTED)
    host.submit(prompt_of(5, 3), guided())
    host.drain()
    host.submit(prompt_of(5, 4), guided())
    host.drain()
    host.check_answers()
    assert len(host.trials.tried) == 1


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("the grammar is refused: too long", "grammar"),
        ("the grammar is refused: the tool 'f': no such keyword", "tools"),
    ],
)
def test_a_refusal_reaches_all_who_wait_and_is_remembered(message: str, param: str) -> None:
    host = GrammarHost()
    uids = [host.submit(prompt_of(5, salt), guided()) for salt in range(3)]
    host.step()
    host.post_verdict(GrammarVerdictMsg(0, message))
    uids.append(host.submit(prompt_of(5, 3), guided()))
    host.drain()
    errors = [host.answer(uid).error for uid in uids]
    assert [error and (error.message, error.param) for error in errors] == [(message, param)] * 4
    assert len(host.trials.tried) == 1


def own_fault(reason: str) -> ReplyError:
    text = f"the grammar passed its trial and cannot be compiled: {reason}; try again later"
    return ReplyError(503, "unavailable", text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), own_fault("MemoryError")),
        (RuntimeError("no\nluck"), own_fault("no luck")),
        (KeyError("x"), own_fault("'x'")),
        (PanicException("x"), own_fault("x")),
        (
            refusal("no such name"),
            ReplyError(400, "invalid_value", "the grammar is refused: no such name", "grammar"),
        ),
    ],
    ids=repr,
)
def test_only_what_a_compiler_refuses_is_the_clients_fault_and_the_next_is_tried(
    error: BaseException, expected: ReplyError
) -> None:
    """Nobody else ends."""
    host = GrammarHost()
    pending = host.scheduler.pending_grammars
    compiler = pending._compiler
    pending._compiler = FailingCompiler(error)  # type: ignore[assignment]
    neighbour = host.submit(prompt_of(4), exactly(LONG))
    uids = [host.submit(prompt_of(5, salt), guided()) for salt in range(2)]
    host.step()
    host.inbox.post(ACCEPTED)
    host.step()
    wait(pending._pending[0].compiled)
    host.step()
    pending._compiler = compiler
    later = host.submit(prompt_of(5, 3), guided())
    host.step()
    assert len(host.trials.tried) == 2
    host.post_verdict(GrammarVerdictMsg(1, num_bytes=1))
    host.drain()
    host.check_answers()
    assert host.answer(neighbour).finish == "length"
    assert host.answer(later).finish == "stop"
    assert [host.answer(uid).error for uid in uids] == [expected] * 2


def test_a_failure_that_nobody_waits_for_any_more_is_not_remembered() -> None:
    host = GrammarHost()
    pending = host.scheduler.pending_grammars
    pending._compiler = FailingCompiler(MemoryError())  # type: ignore[assignment]
    uid = host.submit(prompt_of(5), guided())
    host.step()
    host.inbox.post(ACCEPTED)
    host.abort(uid)
    host.step()
    wait(pending._pending[0].compiled)
    host.step()
    assert len(pending._pending) == 0
    assert len(host.matchers.known) == 0


@pytest.mark.parametrize(("is_refused", "status"), [(True, 400), (False, 503)])
@pytest.mark.parametrize("error", [None, MemoryError(), InvalidRequest("no tokenizer")], ids=repr)
def test_what_rank_0_cannot_compile_another_rank_refuses_whatever_it_has_found(
    error: Exception | None, is_refused: bool, status: int
) -> None:
    host = GrammarHost(leads=False)
    pending = host.scheduler.pending_grammars
    if error is not None:
        pending._compiler = FailingCompiler(error)  # type: ignore[assignment]
    uid = host.submit(prompt_of(5), guided())
    host.step()
    host.inbox.post(ACCEPTED)
    host.step()
    host.inbox.post(GrammarCompiledMsg(0, "no luck on rank 0", is_refused))
    host.drain()
    refused = host.answer(uid).error
    assert refused is not None
    assert (refused.status, refused.message) == (status, "no luck on rank 0")
    assert len(host.matchers.known) == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), InvalidRequest("no tokenizer"), PanicException("x")], ids=repr
)
def test_a_rank_that_cannot_compile_what_rank_0_has_compiled_ends_the_group(
    error: BaseException,
) -> None:
    """Rank 0 goes on with the requests. This rank refused them, if it was an InvalidRequest."""
    host = GrammarHost(leads=False)
    pending = host.scheduler.pending_grammars
    pending._compiler = FailingCompiler(error)  # type: ignore[assignment]
    host.submit(prompt_of(5), guided())
    host.step()
    host.inbox.post(ACCEPTED)
    host.step()
    host.inbox.post(GrammarCompiledMsg(0))
    with pytest.raises(EngineFailed, match="rank 0 has compiled"):
        host.step()


def test_a_trial_without_a_verdict_is_nobodys_fault_and_the_next_is_tried() -> None:
    """Somebody has killed its process, or other work had the processors."""
    host = GrammarHost()
    uids = [host.submit(prompt_of(5, salt), guided()) for salt in range(2)]
    host.step()
    host.post_verdict(GrammarVerdictMsg(0, "no time", is_lasting=False))
    host.drain()
    errors = [host.answer(uid).error for uid in uids]
    assert errors == [ReplyError(503, "unavailable", "no time")] * 2

    host.submit(prompt_of(5, 2), guided())
    host.step()
    assert len(host.trials.tried) == 2
    host.post_verdict(GrammarVerdictMsg(1, num_bytes=1))
    host.drain()
    host.check_answers()


def test_a_trial_is_cancelled_when_the_last_who_waits_is_aborted() -> None:
    host = GrammarHost()
    uids = [host.submit(prompt_of(5, salt), guided()) for salt in range(2)]
    host.step()
    host.abort(uids[0])
    host.step()
    assert host.trials.cancelled == []
    host.abort(uids[1])
    host.step()
    assert host.trials.cancelled == [0]
    assert [host.answer(uid).finish for uid in uids] == ["abort", "abort"]

    host.post_verdict(ACCEPTED)  # it came too late
    host.drain()
    host.submit(prompt_of(5), guided())
    host.step()
    assert len(host.trials.tried) == 2
    host.post_verdict(GrammarVerdictMsg(1, num_bytes=1))
    host.drain()


def test_an_abort_while_a_grammar_is_compiled_ends_the_request_alone() -> None:
    host = GrammarHost()
    uids = [host.submit(prompt_of(5, salt), guided()) for salt in range(2)]
    host.step()
    host.abort(uids[0])
    host.post_verdict(ACCEPTED)
    host.drain()
    host.check_answers()
    assert [host.answer(uid).finish for uid in uids] == ["abort", "stop"]


def test_a_rank_that_does_not_lead_tries_nothing_and_waits_for_the_leaders_word() -> None:
    host = GrammarHost(leads=False)
    uid = host.submit(prompt_of(5), guided())
    host.step()
    host.post_verdict(ACCEPTED)
    assert host.inbox.msgs == [], "it posts nothing"
    assert host.answer(uid).tokens == []
    host.inbox.post(GrammarCompiledMsg(0))
    host.drain()
    host.check_answers()
    assert host.trials.tried == []


def test_a_prompt_that_cannot_fit_costs_no_trial() -> None:
    host = GrammarHost()
    uid = host.submit(prompt_of(1000), guided())
    host.drain()
    assert host.answer(uid).error is not None
    assert host.trials.tried == []


def test_the_end_closes_the_trials() -> None:
    host = GrammarHost()
    host.submit(prompt_of(5), guided())
    host.inbox.post(ExitMsg())
    host.step()
    assert host.trials.is_closed


def test_nothing_begins_after_the_end() -> None:
    """Another tokenizer, or the thread of the trials, may still send what it was about to."""
    host = GrammarHost()
    waiting = host.submit(prompt_of(5), guided())
    host.step()
    host.inbox.post(ExitMsg())
    host.inbox.post(ACCEPTED)
    late = host.submit(prompt_of(5), guided(seed=1))
    host.step()
    assert len(host.trials.tried) == 1
    assert not host.scheduler.is_running
    assert host.open_uids == [waiting, late]


def test_known_grammars_are_bounded_by_bytes_and_the_oldest_go() -> None:
    grammars = [guided(seed=seed).grammar for seed in range(4)]
    known = KnownGrammars(max_bytes=25_000)
    for grammar in grammars[:2]:
        assert grammar is not None
        known.add(grammar, [FakeMatcher()], 10_000 - 2_000)  # type: ignore[arg-type]
    first, second, third, _ = grammars
    assert first
    assert second
    assert third
    known.open(first)
    known.add(third, [FakeMatcher()], 10_000)  # type: ignore[arg-type]
    assert first in known
    assert third in known
    assert second not in known


def test_a_first_grammar_finds_all_ready(checkpoint: Callable[[str], Path]) -> None:
    """The trial process runs, the tokenizer is read, and a grammar was tried and compiled."""
    model = GrammarModel(str(checkpoint("qwen2")), VOCAB_SIZE, [EOS_ID])
    compiler = GrammarCompiler(model)
    trials = GrammarTrials(model)
    messages: list[Any] = []
    pending = PendingGrammars(KnownGrammars(), GrammarTools(compiler, trials), messages.append)
    try:
        pending.get_ready()
        assert trials._process is not None
        assert trials._process.process.poll() is None
        assert compiler._reading is not None
        assert compiler._reading.done()
        assert trials._num_trials == 1
        assert not messages, "no request waits for it"
    finally:
        pending.close()


def test_a_tokenizer_that_cannot_be_read_is_no_reason_not_to_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    model = GrammarModel(str(tmp_path), VOCAB_SIZE, [EOS_ID])
    trials = GrammarTrials(model)
    tools = GrammarTools(GrammarCompiler(model), trials)
    pending = PendingGrammars(KnownGrammars(), tools, print)
    try:
        pending.get_ready()
    finally:
        pending.close()
    assert "grammars cannot be followed" in caplog.text


def test_a_tokenizer_that_cannot_be_read_is_said_by_one_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    config = SchedulerConfig(model=str(tmp_path))
    for leads in (True, False):
        tools = GrammarTools.of(config, VOCAB_SIZE, {EOS_ID}, leads=leads)
        pending = PendingGrammars(KnownGrammars(), tools, print)
        try:
            pending.get_ready()
        finally:
            pending.close()
    assert len(caplog.messages) == 1


def test_a_request_hears_why_the_tokenizer_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    model = GrammarModel(str(tmp_path), VOCAB_SIZE, [EOS_ID])
    with pytest.raises(ValueError, match="tokenizer") as reading:
        GrammarCompiler(model).read_tokenizer()
    trials = GrammarTrials(model)
    verdicts: list[Verdict] = []
    try:
        for pattern in ("yes", "no"):
            trial = trials.start(Grammar("regex", pattern), verdicts.append)
            trial.future.result()
        assert trials._process is not None
        assert trials._process.process.poll() is None
    finally:
        trials.close()
    reason = f"the model's tokenizer cannot be read for grammars: {reading.value}"
    assert verdicts == [Verdict.refused(reason)] * 2


def test_a_tokenizer_that_this_rank_alone_cannot_read_refuses_grammars(tmp_path: Path) -> None:
    compiler = GrammarCompiler(GrammarModel(str(tmp_path), VOCAB_SIZE, [EOS_ID]))
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        compiler.read_tokenizer()
    with pytest.raises(InvalidRequest, match=r"the grammar is refused: .*directory"):
        compiler.compile(Grammar("regex", "yes"))


@pytest.mark.parametrize("other", [99_999, -1])
def test_an_end_of_sequence_outside_of_the_vocabulary_ends_no_grammar(
    other: int, checkpoint: Callable[[str], Path]
) -> None:
    config = SchedulerConfig(model=str(checkpoint("qwen2")))
    compiler = GrammarTools.of(config, VOCAB_SIZE, {EOS_ID, other}, leads=False).compiler
    assert compiler.tokenizer.eos_token == EOS_ID
    compiler.compile(Grammar("regex", "ab?"))
