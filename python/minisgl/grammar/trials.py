"""Grammars are tried in a process of their own before anything else compiles them.

A text of two kilobytes can take llguidance minutes and gigabytes, and nothing can stop it. The
trial process can be killed. It starts when it is opened, or else with the first grammar, and is
kept. A thread here asks it about one grammar after the other and waits for its verdicts.

Nearly all grammars take milliseconds. So a trial first has a short turn. One that needs more time
is started again in a long turn, behind others that need one (`turns.py`). So slow grammars wait for
each other and hardly delay the others. If both wait, each side gets half of the time.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec

from minisgl.core import Grammar
from minisgl.grammar.compiler import GrammarModel, refusal
from minisgl.grammar.turns import Turn, Turns
from minisgl.processes.child import end_signals_blocked
from minisgl.utils.env import env_for_forks
from minisgl.utils.threads import started_executor

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0
_START_S = 90.0  # until the process has read its tokenizer, where others use the processors
_DELAY_S = 5.0  # of a verdict, where others use the processors
_NICENESS = 10  # the trial process yields to the engine, also while it imports
_MAX_NICENESS = 19  # setpriority(2)


class Verdict(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        error: why the grammar is refused, or was not tried to the end; None if it is accepted.
        num_bytes: memory that it takes when it is compiled.
        is_lasting: whether another trial would end alike. If not, the grammar is not to blame.
        is_out_of_time: whether it is refused because its turn was too short.
    """

    error: str | None = None
    num_bytes: int = 0
    is_lasting: bool = True
    is_out_of_time: bool = False

    @classmethod
    def refused(cls, reason: str) -> Verdict:
        return cls(str(refusal(reason)))

    @classmethod
    def of_no_end(cls, reason: str) -> Verdict:
        """Say that nothing is known of a grammar, because its trial was not brought to its end."""
        return cls(f"{reason}; try again later", is_lasting=False)

    @classmethod
    def out_of_time(cls, cpu_s: float) -> Verdict:
        reason = refusal(f"it takes more than {cpu_s:g} s to compile")
        return cls(str(reason), is_out_of_time=True)

    @classmethod
    def broken_off(cls) -> Verdict:
        """The trial was ended from outside, such as by an operator or by Linux."""
        return cls.of_no_end("the trial of the grammar was broken off")


class TrialLimits(msgspec.Struct, frozen=True):
    """The limits of a trial.

    Attributes:
        cpu_s: time on a processor, in a long turn.
        first_cpu_s: the same in the first turn.
        wall_s: elapsed time, since other processes may use the processors.
        num_bytes: memory, in addition to the tokenizer's.
    """

    cpu_s: float = 1.0
    first_cpu_s: float = 0.05
    wall_s: float = 30.0
    num_bytes: int = 2**29


_DEFAULT_LIMITS = TrialLimits()


class TrialSetup(msgspec.Struct, frozen=True):
    """First message to the trial process."""

    model: GrammarModel
    limits: TrialLimits


class TrialRequest(msgspec.Struct, frozen=True):
    """Later messages to the trial process: a turn of a trial.

    Attributes:
        number: of the trial.
        cpu_s: its time on a processor.
    """

    number: int
    grammar: Grammar
    cpu_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A trial that waits for a turn, has one, or has ended.

    Attributes:
        report: gets its verdict.
        future: done at its end; cancelled if it was cancelled while it waited.
    """

    number: int
    grammar: Grammar
    report: Callable[[Verdict], None]
    future: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Process:
    """The trial process.

    Attributes:
        link: grammars to it, verdicts from it. Too long a wait for it is an OSError: what is
            stopped does not even take a large grammar.
        cancels: sends it the numbers of cancelled trials.
    """

    process: subprocess.Popen[bytes]
    link: Connection
    cancels: Connection


class GrammarTrials:
    """Tries grammars in turns, one at a time; `Turns` says how long one waits for its turn.

    If the process dies during a turn, the turn is repeated once in another process: the grammar
    need not be the reason. If that process dies too, or cannot be started, the verdict says so. A
    process that does not answer, such as a stopped one, is killed after a time above all limits.

    Raises:
        RuntimeError: the system has no thread left.
    """

    def __init__(self, model: GrammarModel, limits: TrialLimits = _DEFAULT_LIMITS) -> None:
        self._setup = TrialSetup(model, limits)
        self._executor = started_executor("trials")
        self._lock = threading.Lock()  # held while a process is started, or none any more
        self._cancelling = threading.Lock()  # held while a connection for cancels is used or closed
        self._is_closed = False
        self._process: _Process | None = None
        self._num_trials = 0
        self._queueing = threading.Lock()  # held while the next three are used
        self._turns: Turns[Trial] = Turns()
        self._is_trying = False  # the thread does, until nothing waits
        self._running: Trial | None = None  # None also if it was cancelled meanwhile

    def open(self) -> None:
        """Start the trial process, without waiting until it is ready. Trials go before this."""
        self._executor.submit(self._running_process).result()

    def start(self, grammar: Grammar, report: Callable[[Verdict], None]) -> Trial:
        """Try a grammar; `report` is called on another thread, unless the trial is cancelled."""
        trial = Trial(self._num_trials, grammar, report)
        self._num_trials += 1
        with self._queueing:
            self._turns.add(trial)
            if not self._is_trying:
                self._executor.submit(self._take_turns)
                self._is_trying = True
        return trial

    def cancel(self, trial: Trial) -> None:
        """Cancel a trial that no request waits for. A verdict that it has is still reported."""
        with self._queueing:
            if self._turns.discard(trial):
                trial.future.cancel()
            if trial is not self._running:
                return
            self._running = None
        with self._cancelling, suppress(OSError):
            if self._process is not None:
                self._process.cancels.send_bytes(msgspec.json.encode(trial.number))

    def close(self) -> None:
        """End the trial process. Trials that have not ended report nothing."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            process = self._process
        with self._queueing:
            while (turn := self._turns.take()) is not None:
                turn.who.future.cancel()
            self._running = None
        if process is not None:
            _kill(process.process)

    def _take_turns(self) -> None:
        """Runs on the thread: try what waits, until nothing does."""
        while (turn := self._next_turn()) is not None:
            start_s = time.monotonic()
            verdict = self._try(turn)
            self._end_turn(turn, verdict, time.monotonic() - start_s)

    def _next_turn(self) -> Turn[Trial] | None:
        with self._queueing:
            turn = None if self._is_closed else self._turns.take()
            self._is_trying = turn is not None
            self._running = turn.who if turn is not None else None
            return turn

    def _try(self, turn: Turn[Trial]) -> Verdict:
        """Whatever fails, there is a verdict, because requests wait for it."""
        trial = turn.who
        limits = self._setup.limits
        cpu_s = limits.cpu_s if turn.is_long else limits.first_cpu_s
        request = TrialRequest(trial.number, trial.grammar, cpu_s)
        try:
            return self._ask(request) or self._ask(request) or Verdict.broken_off()
        except Exception:
            logger.exception("the trial of a grammar fails")
            return Verdict.broken_off()

    def _end_turn(self, turn: Turn[Trial], verdict: Verdict, turn_s: float) -> None:
        """Report the verdict, or let the trial wait for a long turn."""
        trial = turn.who
        needs_more = verdict.is_out_of_time and not turn.is_long
        with self._queueing:
            self._turns.end(turn, turn_s)
            is_wanted = self._running is trial
            self._running = None
            if is_wanted and needs_more:
                self._turns.add_long(trial)
                return
        try:
            if is_wanted:
                trial.report(verdict)
        except Exception:
            logger.exception("the verdict on a grammar cannot be reported")
        trial.future.set_result(None)

    def _ask(self, request: TrialRequest) -> Verdict | None:
        """The verdict of the process; None if it was killed or stopped."""
        try:
            process = self._running_process()
            process.link.send_bytes(msgspec.json.encode(request))
            verdict = msgspec.json.decode(process.link.recv_bytes(), type=Verdict)
            # It has read its tokenizer, so the next verdict comes within the limits of a trial.
            set_timeout(process.link, self._setup.limits.wall_s + _DELAY_S)
            return verdict
        except (EOFError, OSError):
            self._drop_process()
            return None

    def _running_process(self) -> _Process:
        """Runs on the thread.

        Raises:
            EOFError: the trials have been closed.
        """
        with self._lock:
            if self._is_closed:
                raise EOFError
            if self._process is None:
                self._process = _start(self._setup)
            return self._process

    def _drop_process(self) -> None:
        process = self._process
        if process is None:
            return
        _kill(process.process)
        process.link.close()
        with self._cancelling:
            self._process = None
            process.cancels.close()


def _start(setup: TrialSetup) -> _Process:
    """Start the trial process, with a plain exec: `multiprocessing` would run the main module."""
    link, its_link = _connections()
    cancels, its_cancels = _connections()
    set_timeout(link, setup.limits.wall_s + _START_S)
    os.set_blocking(cancels.fileno(), False)  # a step cancels: it would wait for what is stopped
    ends = (its_link.fileno(), its_cancels.fileno())
    arguments = [str(os.getpid()), *map(str, ends)]
    with end_signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minisgl.grammar.trial_process", *arguments],
            env=env_for_forks(),
            stdin=subprocess.DEVNULL,
            pass_fds=ends,
        )
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, process.pid, min(_MAX_NICENESS, own_niceness + _NICENESS))
    its_link.close()
    its_cancels.close()
    link.send_bytes(msgspec.json.encode(setup))
    return _Process(process, link, cancels)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and reap it if it ends soon: the kernel may hold it up, as while it swaps."""
    process.kill()
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning(
            "trial process %d is killed, and has not ended within %g s",
            process.pid,
            _EXIT_TIMEOUT_S,
        )


def _connections() -> tuple[Connection, Connection]:
    """Both ends of a socket that sends whole messages."""
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def set_timeout(connection: Connection, timeout_s: float) -> None:
    """Bound how long one end of a socket waits for the other one; then there is an OSError."""
    timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
