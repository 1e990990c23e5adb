"""A child process, as its parent sees it, and the thread that starts it."""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue

import msgspec

from minisgl.processes.child import Assignment, StartupReport, end_signals_blocked

logger = logging.getLogger(__name__)

_EXIT_CODE_TIMEOUT_S = 5.0


def exit_code_of(process: SpawnProcess) -> int:
    """The exit code of a process that is dead, or about to end; negative for a signal.

    `join` returns at once, without the code, while another thread of this program collects it:
    `multiprocessing` does so for all children whenever it starts one.
    """
    deadline = time.monotonic() + _EXIT_CODE_TIMEOUT_S
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(max(0.0, deadline - time.monotonic()))
    return 0 if process.exitcode is None else process.exitcode


@dataclass(slots=True)
class ChildProcess:
    """A process, the reading end of the pipe for its reports, and its beat.

    `multiprocessing` keeps its name.

    Attributes:
        started_at: when it was started, or got its assignment, by `time.monotonic`.
        assignment_pipe: the writing end of the pipe for its assignment, while it stands by.
        is_starting: it has not reported that it is ready.
        failure: its report of its failure.
        num_still_ticks: ticks since its beat last changed.
    """

    process: SpawnProcess
    reader: Connection
    beats: ctypes.c_ulong
    started_at: float
    assignment_pipe: Connection | None = None
    is_starting: bool = True
    failure: StartupReport | None = None
    num_still_ticks: int = 0
    last_beats: int = 0

    def tick(self) -> None:
        """Look whether it has beaten since the last tick."""
        beats = self.beats.value
        self.num_still_ticks = self.num_still_ticks + 1 if beats == self.last_beats else 0
        self.last_beats = beats

    def read_report(self) -> StartupReport | None:
        """Wait for a report. None if the process has closed its end before."""
        try:
            return msgspec.json.decode(self.reader.recv_bytes(), type=StartupReport)
        except EOFError:
            return None

    def give(self, assignment: Assignment) -> None:
        """Give a child that stands by its assignment. One that has died will not confirm it."""
        assert self.assignment_pipe
        with suppress(BrokenPipeError):
            self.assignment_pipe.send(assignment)

    def confirms(self, deadline: float) -> bool:
        """Whether a child confirms its assignment until then; it starts anew in this case.

        Args:
            deadline: by `time.monotonic`.
        """
        if not self.reader.poll(max(0.0, deadline - time.monotonic())):
            return False
        confirmation = self.read_report()
        if confirmation is None or confirmation.failure:
            return False
        assert self.assignment_pipe
        self.assignment_pipe.close()
        self.assignment_pipe = None
        self.started_at = time.monotonic()
        self.is_starting = True
        self.num_still_ticks = 0
        return True

    @property
    def name(self) -> str:
        return self.process.name

    def look_for_reports(self) -> None:
        """Note that it is ready, or why it has failed."""
        while self.reader.poll():
            report = self.read_report()
            if report is None:
                return
            if report.failure:
                self.failure = report
            else:
                self.is_starting = False
                self.num_still_ticks = 0
                logger.info("%s is ready", self.name)

    def exit_code(self) -> int:
        """Its exit code, once it is dead; negative for a signal."""
        return exit_code_of(self.process)

    def describe_death(self) -> str:
        """The exit code of a dead child, and its last report's reason."""
        code = self.exit_code()
        self.look_for_reports()
        death = f"{self.name} died with exit code {code}"
        if -code in set(signal.Signals):
            death += f" ({signal.Signals(-code).name})"
        if self.failure:
            death += f": {self.failure.failure}"
        return death

    def close(self) -> None:
        """Wait until it has ended, and close its pipes."""
        self.process.join()
        self.reader.close()
        if self.assignment_pipe:
            self.assignment_pipe.close()


class ProcessStarter:
    """A thread that starts processes: they die with the thread that has started them.

    The caller's thread may end long before, and a thread of an executor ends before functions of
    `atexit` run.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="starter", daemon=True)
        self._thread.start()

    def start(self, process: SpawnProcess) -> None:
        """Start a process. An interrupt is raised when it has been started, a second one before."""
        try:
            self._do(partial(_start, process)).result()
        except BaseException:
            self.wait()
            raise

    def wait(self) -> None:
        """Wait until whatever was to be started has been, or has failed to."""
        if self._thread.is_alive():  # else all has ended
            futures.wait([self._do(_nothing)])

    def end(self) -> None:
        """End the thread, and what it has started and is still alive."""
        self._jobs.put(None)
        self._thread.join()

    def _do(self, job: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def _run(self) -> None:
        while work := self._jobs.get():
            job, done = work
            try:
                job()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


def _start(process: SpawnProcess) -> None:
    with end_signals_blocked():
        process.start()


def _nothing() -> None:
    pass
