"""Trials of grammars: what attacks cost, what is accepted, and what becomes of the process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import msgspec
import psutil
import pytest

from minisgl.core import Grammar
from minisgl.grammar import (
    GrammarCompiler,
    GrammarModel,
    GrammarTrials,
    Trial,
    TrialLimits,
    Verdict,
    trial_process,
)
from minisgl.grammar import trials as trials_module
from minisgl.grammar.trials import TrialRequest
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.processes.orphans import ends_with_its_parent, ends_with_its_program

TIMEOUT_S = 60.0
USUAL_NICENESS = trials_module._NICENESS


def patterns(count: int) -> str:
    """A schema of two kilobytes, for which llguidance needs minutes and gigabytes."""
    each = [{"type": "string", "pattern": f"^(.*[a-f]){{{k}}}.*$"} for k in range(1, count)]
    return json.dumps({"allOf": each})


YES = Grammar("regex", "yes")
LONG = Grammar("lark", 'start: "yes"\n' + "//" * 2**19)
BOMB = Grammar("json_schema", patterns(40))


def bombs(count: int) -> list[Grammar]:
    return [Grammar(BOMB.kind, BOMB.text + " " * number) for number in range(count)]


class Trials(GrammarTrials):
    """Waits for verdicts."""

    def ask(self, grammar: Grammar) -> Verdict:
        verdicts: list[Verdict] = []
        self.start(grammar, verdicts.append).future.result(TIMEOUT_S)
        [verdict] = verdicts
        return verdict


@pytest.fixture(scope="module", autouse=True)
def other_work_takes_no_precedence() -> Iterator[None]:
    """On a loaded machine a trial would not be brought to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials_module, "_NICENESS", 1)
        yield


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> GrammarModel:
    return GrammarModel(str(checkpoint("qwen2")), VOCAB_SIZE, [EOS_ID])


@pytest.fixture(scope="module")
def trials(model: GrammarModel) -> Iterator[Trials]:
    trials = Trials(model)
    yield trials
    trials.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def refusal(reason: str) -> str:
    return f"the grammar is refused: {reason}"


BROKEN_OFF = Verdict("the trial of the grammar was broken off; try again later", is_lasting=False)


def test_a_grammar_that_takes_long_is_refused_and_the_next_is_tried(trials: Trials) -> None:
    assert trials.ask(BOMB).error == refusal("it takes more than 1 s to compile")
    assert trials.ask(YES).error is None


def test_a_grammar_that_takes_much_memory_is_refused(model: GrammarModel) -> None:
    limits = TrialLimits(cpu_s=60.0, wall_s=60.0, num_bytes=2**26)
    trials = Trials(model, limits)
    try:
        assert trials.ask(BOMB).error == refusal("it takes more than 64 MiB to compile")
        assert trials.ask(YES).error is None
    finally:
        trials.close()


def test_a_mistake_is_named_and_a_large_grammar_counts_more_bytes(trials: Trials) -> None:
    mistake = trials.ask(Grammar("regex", "[0-9")).error
    assert mistake is not None
    assert "unclosed character class" in mistake

    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(7000))
    large = trials.ask(Grammar("lark", f'start: r0\n{rules}r7000: "yes"'))
    small = trials.ask(YES)
    assert (large.error, small.error) == (None, None)
    assert large.num_bytes > 4 * small.num_bytes


def test_code_that_a_schema_needs_first_is_not_counted_as_its_memory(trials: Trials) -> None:
    verdict = trials.ask(Grammar("json_schema", '{"type": "object", "properties": {"a": {}}}'))
    assert verdict.error is None
    assert verdict.num_bytes <= 2**19  # its matcher takes less than 2**17


def test_the_process_yields_to_the_engine(
    model: GrammarModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials_module, "_NICENESS", USUAL_NICENESS)
    trials = Trials(model)
    try:
        trials.open()
        assert trials._process is not None
        niceness = os.getpriority(os.PRIO_PROCESS, trials._process.process.pid)
    finally:
        trials.close()
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness == min(19, own_niceness + 10)


@pytest.fixture
def endless_trials(model: GrammarModel) -> Iterator[Trials]:
    """With limits that no test waits for."""
    limits = TrialLimits(cpu_s=3600.0, first_cpu_s=3600.0, wall_s=3600.0, num_bytes=2**40)
    trials = Trials(model, limits)
    yield trials
    trials.close()


def test_a_cancelled_trial_ends_and_one_that_waits_never_begins(endless_trials: Trials) -> None:
    trials = endless_trials
    verdicts: list[Verdict] = []
    assert trials.ask(YES).error is None  # the process runs
    running = trials.start(BOMB, verdicts.append)
    waiting = trials.start(BOMB, verdicts.append)
    trials.cancel(waiting)
    trials.cancel(running)
    assert trials.ask(YES).error is None
    assert waiting.future.cancelled()
    assert verdicts == []


def test_grammars_that_take_long_do_not_hold_up_one_that_does_not(model: GrammarModel) -> None:
    """Each is another one, as from a client that sends many."""
    trials = Trials(model, TrialLimits(cpu_s=0.3))
    ends: list[str] = []
    try:
        started = [trials.start(bomb, lambda _: ends.append("long")) for bomb in bombs(3)]
        started.append(trials.start(YES, lambda _: ends.append("short")))
        for trial in started:
            trial.future.result(TIMEOUT_S)
    finally:
        trials.close()
    assert len(ends) == 4
    assert ends[-1] == "long"


def test_a_grammar_that_takes_long_has_its_verdict_while_others_come_all_the_time(
    model: GrammarModel,
) -> None:
    """Three clients send another one as soon as they have a verdict."""
    trials = Trials(model, TrialLimits(cpu_s=0.3))
    num_others = 0

    def send(_: object = None) -> None:
        nonlocal num_others
        num_others += 1
        with suppress(RuntimeError):  # the trials have been closed
            trials.start(Grammar("regex", f"yes{num_others}"), send)

    try:
        assert trials.ask(YES).error is None
        for _ in range(3):
            send()
        trials.ask(BOMB)
        assert num_others > 3
    finally:
        trials.close()


def test_a_trial_that_is_cancelled_before_its_long_turn_never_has_one(
    endless_trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for that, or still in its first turn."""
    trials = endless_trials
    asked: list[str] = []
    reported: list[str] = []
    last_runs = threading.Event()
    may_end = threading.Event()

    def start(text: str) -> Trial:
        return trials.start(Grammar("regex", text), lambda _: reported.append(text))

    def ask(request: TrialRequest) -> Verdict:
        text = request.grammar.text
        asked.append(text)
        if asked.count(text) == 2:
            time.sleep(1.0)  # which the first turns of the others may take then
            return Verdict()
        if text == "last":
            last_runs.set()
            may_end.wait(TIMEOUT_S)
        return Verdict.out_of_time(0.1)

    monkeypatch.setattr(trials, "_ask", ask)
    names = ["long", "waits", "last"]
    long, waits, last = (start(name) for name in names)
    last_runs.wait(TIMEOUT_S)
    for trial in (waits, last):
        trials.cancel(trial)
    assert waits.future.cancelled()
    may_end.set()
    last.future.result(TIMEOUT_S)
    assert long.future.done()
    assert asked == ["long", "long", "waits", "last"]
    assert reported == ["long"]


def test_nothing_is_kept_of_a_trial_that_is_cancelled_before_it_begins(
    endless_trials: Trials,
) -> None:
    """Its grammar may be large, and the trial before it may take long."""

    class Report:
        def __call__(self, verdict: Verdict) -> None:
            raise AssertionError(verdict)

    trials = endless_trials
    running = trials.start(BOMB, lambda _: None)
    wait_until(lambda: trials._running is running)
    report = Report()
    kept = weakref.ref(report)
    trials.cancel(trials.start(YES, report))
    del report
    gc.collect()
    assert kept() is None
    assert trials._running is running
    trials.cancel(running)


def test_a_process_that_is_dropped_while_a_trial_is_cancelled_is_closed_after_it(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its number is None, or another file's, when the cancel is written."""
    assert trials.ask(YES).error is None
    process = trials._process
    assert process is not None
    is_sending = threading.Event()
    was_closed: list[bool] = []

    def send(_message: bytes) -> None:
        is_sending.set()
        time.sleep(0.2)
        was_closed.append(process.cancels.closed)

    monkeypatch.setattr(process.cancels, "send_bytes", send)
    running = Trial(0, YES, lambda _: None)
    trials._running = running
    canceller = threading.Thread(target=trials.cancel, args=(running,))
    canceller.start()
    is_sending.wait(TIMEOUT_S)
    trials._drop_process()
    canceller.join(TIMEOUT_S)
    assert was_closed == [False]
    assert process.cancels.closed


def test_of_processes_that_were_killed_nothing_stays(model: GrammarModel) -> None:
    """No entry in the system's table: neither of a fork, nor of the trial process."""
    trials = Trials(model, TrialLimits(cpu_s=3600.0, wall_s=3.0, num_bytes=2**40))
    pids: list[int] = []
    try:
        for _ in range(2):
            assert trials.ask(BOMB).error is not None  # its fork is killed
            assert trials._process is not None
            process = trials._process.process
            pids.append(process.pid)
            assert children_of(process.pid) == []
            process.kill()
        assert trials.ask(YES).error is None
        assert [psutil.pid_exists(pid) for pid in pids] == [False, False]
        pids.append(trials._process.process.pid)
    finally:
        trials.close()
    assert [psutil.pid_exists(pid) for pid in pids] == [False] * 3


def test_the_process_ends_with_its_scheduler_even_if_that_is_killed(model: GrammarModel) -> None:
    program = f"""
import signal
from minisgl.core import Grammar
from minisgl.grammar import GrammarModel, GrammarTrials
trials = GrammarTrials({model!r})
trials.start(Grammar("regex", "yes"), lambda _: None).future.result()
print(trials._process.process.pid, flush=True)
signal.pause()
"""
    assert ends_with_its_program(program)


def test_a_fork_ends_with_the_process_even_if_that_is_killed(endless_trials: Trials) -> None:
    trials = endless_trials
    assert trials.ask(YES).error is None  # the process runs
    assert trials._process is not None
    pid = trials._process.process.pid
    bomb = trials.start(BOMB, print)
    wait_until(lambda: children_of(pid) != [])
    [fork] = children_of(pid)
    wait_until(lambda: len(list(Path(f"/proc/{fork}/task").iterdir())) > 1)
    assert ends_with_its_parent(fork, pid)
    trials.cancel(bomb)


def test_a_process_that_somebody_kills_is_replaced_and_the_grammar_is_not_blamed(
    trials: Trials,
) -> None:
    assert trials.ask(YES).error is None
    assert trials._process is not None
    trials._process.process.kill()
    assert trials.ask(YES).error is None


@pytest.mark.parametrize("grammar", [YES, LONG], ids=["short", "longer than the socket"])
def test_a_process_that_somebody_stops_is_replaced_and_the_grammar_is_not_blamed(
    grammar: Grammar, model: GrammarModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And soon: a process that has given a verdict needs no time to start any more."""
    monkeypatch.setattr("minisgl.grammar.trials._DELAY_S", 0.2)
    trials = Trials(model, TrialLimits(wall_s=5.0))
    try:
        assert trials.ask(YES).error is None
        stopped = trials._process
        assert stopped is not None
        os.kill(stopped.process.pid, signal.SIGSTOP)
        assert trials.ask(grammar).error is None
        assert trials._process is not stopped
    finally:
        trials.close()


def test_a_stopped_process_does_not_hold_up_who_cancels(endless_trials: Trials) -> None:
    trials = endless_trials
    trials.open()
    bomb = trials.start(BOMB, lambda verdict: None)
    wait_until(lambda: trials._running is bomb)
    assert trials._process is not None
    os.kill(trials._process.process.pid, signal.SIGSTOP)
    for _ in range(10_000):  # more than a socket holds
        trials.cancel(bomb)
    trials._process.process.kill()


def test_a_grammar_that_others_leave_no_time_is_not_blamed(model: GrammarModel) -> None:
    trials = Trials(model, TrialLimits(cpu_s=3600.0, wall_s=0.25, num_bytes=2**40))
    try:
        reason = "the grammar was not compiled within 0.25 s; other work has the processors"
        assert trials.ask(BOMB) == Verdict(f"{reason}; try again later", is_lasting=False)
    finally:
        trials.close()


def test_a_grammar_whose_trial_is_broken_off_twice_is_not_blamed(endless_trials: Trials) -> None:
    trials = endless_trials
    verdicts: list[Verdict] = []
    trials.open()
    bomb = trials.start(BOMB, verdicts.append)
    first = trials._process
    assert first is not None
    first.process.kill()
    wait_until(lambda: trials._process not in (None, first))
    assert trials._process is not None
    trials._process.process.kill()
    bomb.future.result(TIMEOUT_S)
    assert verdicts == [BROKEN_OFF]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1], ids=str)
def test_a_grammar_is_not_blamed_for_long_if_somebody_kills_its_fork(
    number: signal.Signals, endless_trials: Trials
) -> None:
    trials = endless_trials
    assert trials.ask(YES).error is None  # the process runs
    assert trials._process is not None
    pid = trials._process.process.pid
    verdicts: list[Verdict] = []
    bomb = trials.start(BOMB, verdicts.append)
    wait_until(lambda: children_of(pid) != [])
    [fork] = children_of(pid)
    os.kill(fork, number)
    bomb.future.result(TIMEOUT_S)
    assert verdicts == [BROKEN_OFF]
    assert trials._process.process.pid == pid


def no_thread(*_: object) -> NoReturn:
    """What Python does if the system has no thread left: in place of `Thread.start`."""
    raise RuntimeError("can't start new thread")


def test_a_trial_needs_no_thread(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert trials.ask(YES).error is None


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), OSError(), MemoryError()]
)
def test_a_grammar_has_a_verdict_also_if_no_process_can_be_started(
    model: GrammarModel, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[Verdict] = []
    trials = GrammarTrials(model)
    monkeypatch.setattr("minisgl.grammar.trials._start", Mock(side_effect=error))
    try:
        trial = trials.start(YES, verdicts.append)
        wait([trial.future], TIMEOUT_S)
        assert verdicts == [BROKEN_OFF]
    finally:
        trials.close()


def test_a_grammar_is_not_blamed_if_its_fork_gets_no_thread(
    model: GrammarModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    verdict = trial_process._compile_under_limits(GrammarCompiler(model), YES, TrialLimits())
    assert verdict == BROKEN_OFF


SHORT_OF_FILES = """
import errno, sys
from multiprocessing.connection import Connection
from minisgl.grammar import compiler, trial_process

read_json = compiler._read_json

def read_if_there_is_room(folder):
    if (folder / "shortage").exists():
        raise OSError(errno.EMFILE, "Too many open files")
    return read_json(folder)

compiler._read_json = read_if_there_is_room
trial_process.main(int(sys.argv[1]), *(Connection(int(end)) for end in sys.argv[2:]))
"""


def test_no_grammar_is_blamed_for_a_shortage_while_the_tokenizer_is_read(
    model: GrammarModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(model.folder) / "tokenizer.json", tmp_path)
    shortage = tmp_path / "shortage"
    shortage.touch()
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        place = command.index("-m")
        return popen([*command[:place], "-c", SHORT_OF_FILES, *command[place + 2 :]], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    trials = Trials(msgspec.structs.replace(model, folder=str(tmp_path)))
    try:
        verdict = trials.ask(YES)
        assert verdict.error is not None
        assert verdict.error.endswith("[Errno 24] Too many open files; try again later")
        assert not verdict.is_lasting
        shortage.unlink()
        assert trials.ask(YES).error is None
    finally:
        trials.close()


class BrokenCompiler:
    def compile(self, grammar: Grammar) -> NoReturn:
        raise KeyError(grammar.text)


def test_a_bug_in_a_trial_is_not_the_grammars_fault_and_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cancels, other_end = Pipe()
    with cancels, other_end:
        verdict = trial_process._try(
            BrokenCompiler(),  # type: ignore[arg-type]
            TrialRequest(0, YES, cpu_s=1.0),
            TrialLimits(),
            cancels,
        )
    failed = "the trial of the grammar failed: KeyError; try again later"
    assert verdict == Verdict(failed, is_lasting=False)
    assert "KeyError: ''" in capfd.readouterr().err, "of the first grammar"


def test_a_killed_process_that_does_not_end_holds_up_no_grammar(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(timeout_s: float) -> None:
        raise subprocess.TimeoutExpired("trial process", timeout_s)

    assert trials.ask(YES).error is None
    assert trials._process is not None
    stuck = trials._process.process
    with monkeypatch.context() as patches:
        patches.setattr(stuck, "wait", wait)
        stuck.kill()
        assert trials.ask(YES).error is None
    assert f"trial process {stuck.pid}" in caplog.text
    stuck.wait()


def test_the_end_of_all_trials_starts_no_other_process(endless_trials: Trials) -> None:
    trials = endless_trials
    trials.open()
    bomb = trials.start(BOMB, lambda _: None)
    wait_until(lambda: trials._running is bomb)
    trials.close()
    bomb.future.result(TIMEOUT_S)
    assert trials._process is None
