"""Child processes: they start together, are ready together, and their ends are noticed.

Owns the processes. Each child reports over a pipe, in JSON, that it is ready or why it cannot
start. No child outlives this process (`die_with_parent`). The rest of a tensor-parallel group would
wait for a dead rank in a collective, which nothing but the end of a process interrupts: so `LLM`
lets all children end with the first. The server asks for the next failure, and decides which
children it kills and starts again.

A child that lives may still hang. Each has a counter in shared memory, its *beat*, which it raises
whenever it looks for messages. If it stands still for as long as the caller says, the child is
killed.

Where an import takes seconds, a child may do it and then stand by, to take the place of one that
has failed (`start_standby`, `assign`).
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from minisgl.errors import ConfigError, EngineFailed
from minisgl.processes.child import Assignment, StartupReport, at_exit, run_child
from minisgl.processes.child_process import ChildProcess, ProcessStarter
from minisgl.processes.failures import Failure, first_death, next_failure, sentinels_of
from minisgl.utils.shortages import is_shortage

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0
_CONFIRMATION_TIMEOUT_S = 2.0  # of all together that are to take over
_MAX_STILL_TICKS = 4  # of a child that stands by and is to take over


class Supervisor:
    """A set of named children.

    `start` them, `wait_ready`, then wait for the `next_failure` in an event loop, or
    `end_together`. At the end of the `with` block they have a few seconds to end; then they are
    killed. After an error they are killed at once.
    """

    def __init__(self, log_level: str, *, log_json: bool = False) -> None:
        self._log_level = log_level
        self._log_json = log_json
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, ChildProcess] = {}
        self._starter = ProcessStarter()
        self._guard: threading.Thread | None = None
        self._is_stopping = False
        self._death = ""
        # It holds the children alone: this object may be freed without having been closed.
        self._kill_at_exit = at_exit(partial(_kill, self._children))

    @property
    def sentinels(self) -> list[int]:
        """A descriptor for each child, which can be read when the child has died."""
        return sentinels_of(self._children.values())

    def start(self, name: str, body: str, *args: Any, has_children: bool = False) -> None:
        """Run body(ready, *args) in a new process. It calls ready(StartupReport) once it can work.

        Garbage is not collected until it calls `start_serving`.

        Args:
            body: "module:function". Only the new process imports the module.
            has_children: whether it starts processes by multiprocessing.

        Raises:
            EngineFailed: the system starts no process now.
        """
        try:
            self._start(name, body, *args, has_children=has_children)
        except OSError as error:
            reason = f"{name} cannot be started: {error.strerror}"
            if error.filename is not None:
                reason += f": {error.filename}"
            if is_shortage(error):
                reason += "; see ulimit -u and ulimit -n"
            raise EngineFailed(reason) from None

    def _start(self, name: str, body: str, *args: Any, has_children: bool = False) -> ChildProcess:
        """As `start`, but raises an OSError."""
        reader, writer = self._context.Pipe(duplex=False)
        beats = self._context.RawValue(ctypes.c_ulong)
        process = self._context.Process(
            target=run_child,
            args=(
                name,
                os.getpid(),
                writer,
                beats,
                self._log_level,
                self._log_json,
                body,
                *args,
            ),
            name=name,
            daemon=not has_children,
        )
        child = ChildProcess(process, reader, beats, time.monotonic())
        self._children[name] = child  # first: a signal may end `start`
        try:
            self._starter.start(process)
        except OSError:
            del self._children[name]
            reader.close()
            raise
        finally:
            writer.close()
        return child

    def start_standby(self, name: str, preparation: str) -> None:
        """Start a process that prepares, and then waits to take the place of another.

        Args:
            preparation: "module:function", without arguments. What it imports stays imported.

        Raises:
            OSError: the system starts no process now.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        with receiver:
            try:
                child = self._start(name, "minisgl.processes.child:stand_by", preparation, receiver)
            except OSError:
                sender.close()
                raise
        child.assignment_pipe = sender

    def has_child(self, name: str) -> bool:
        return name in self._children

    def is_prepared(self, name: str) -> bool:
        """Whether a child stands by, is prepared, and has beaten in the last two seconds."""
        child = self._children.get(name)
        if child is None or child.is_starting or not child.process.is_alive():
            return False
        return child.num_still_ticks <= _MAX_STILL_TICKS

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Let children that stand by be what `start` would start.

        One may have died or stopped a moment ago. Then a new process is started instead. All have
        their assignments before the first confirmation is waited for, and one deadline: this takes
        two seconds if any of them is stopped, however many are.

        Args:
            assignments: by the names of those that stand by.

        Raises:
            EngineFailed: the system starts no process now.
        """
        for standby, assignment in assignments.items():
            self._children[standby].give(assignment)
        deadline = time.monotonic() + _CONFIRMATION_TIMEOUT_S
        for standby, assignment in assignments.items():
            child = self._children.pop(standby)
            if child.confirms(deadline):
                self._children[assignment.name] = child
                child.process.name = assignment.name
            else:
                logger.warning("%s does not take over", standby)
                child.process.kill()
                child.close()
                self.start(assignment.name, assignment.body, *assignment.args)

    def wait_ready(self, timeout_s: float) -> list[StartupReport]:
        """Wait for the report of every child that was started since the last call.

        Args:
            timeout_s: since the first of them was started.

        Raises:
            ConfigError: a child cannot run with these options or this model.
            EngineFailed: a child died or was not ready in time; the message names it.
        """
        starting = {name: child for name, child in self._children.items() if child.is_starting}
        started_at = min((child.started_at for child in starting.values()), default=0.0)
        deadline = started_at + timeout_s
        waiting = {child.reader: name for name, child in starting.items()}
        reports: list[StartupReport] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(waiting.values())
                raise EngineFailed(f"{names} not ready after {timeout_s:.0f} s")
            for reader in ready:
                assert isinstance(reader, Connection)
                child = self._children[waiting.pop(reader)]
                report = child.read_report()
                reports.append(report or StartupReport(failure=child.describe_death()))
            _raise_failure(reports)
        for child in starting.values():
            child.is_starting = False
        return reports

    async def next_failure(
        self,
        hang_timeout_s: float,
        start_timeout_s: float,
        at_tick: Callable[[], None] = lambda: None,
    ) -> Failure:
        """Wait until a child dies, or hangs and is killed; see `failures.next_failure`.

        Args:
            at_tick: is called twice a second. It may start children.
        """
        return await next_failure(self._children, hang_timeout_s, start_timeout_s, at_tick)

    def kill(self, keep: Collection[str] = ()) -> None:
        """Kill all children but those to keep. Returns at once; `remove` waits."""
        for name, child in self._children.items():
            if name not in keep:
                child.process.kill()

    def remove(self, keep: Collection[str] = ()) -> None:
        """Wait until killed children have ended, and forget them."""
        for name in [name for name in self._children if name not in keep]:
            self.remove_one(name)

    def remove_one(self, name: str) -> None:
        """Wait until a child that is dead or killed has ended, and forget it."""
        self._children.pop(name).close()

    def end_together(self) -> None:
        """From now on, when a child dies, kill the others at once.

        A thread does that, whatever the other threads of this process wait for.
        """
        self._guard = threading.Thread(target=self._wait_for_a_death, name="guard", daemon=True)
        self._guard.start()

    def death(self) -> str:
        """Wait, after `end_together`, until a child has died and the others are killed.

        Returns:
            the name of the first and its exit code, as a sentence.
        """
        assert self._guard
        self._guard.join()
        return self._death

    def _wait_for_a_death(self) -> None:
        wait(self.sentinels)
        if not self._is_stopping:
            self._death = first_death(self._children.values()).describe_death()
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._stop(_EXIT_TIMEOUT_S)
        else:
            self._stop(timeout_s=0.0)

    def _stop(self, timeout_s: float) -> None:
        """Wait until all have ended; kill those that still run after the timeout."""
        self._is_stopping = True
        self._forget_unstarted()
        for child in self._children.values():
            if child.assignment_pipe:  # it would wait for ever
                child.process.kill()
        processes = [child.process for child in self._children.values()]
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                logger.debug("%s is killed", process.name)
                process.kill()
        for process in processes:
            process.join()
        if self._guard:
            self._guard.join()
        self.remove()
        self._starter.end()
        self._kill_at_exit.cancel()

    def _forget_unstarted(self) -> None:
        """Drop a child whose start a signal or an error has ended before it had a process.

        One whose start goes on is waited for.
        """
        self._starter.wait()
        for name in [name for name, child in self._children.items() if child.process.pid is None]:
            self._children.pop(name).reader.close()


def _kill(children: Mapping[str, ChildProcess]) -> None:
    for child in list(children.values()):
        if child.process.pid is not None:
            child.process.kill()


def _raise_failure(reports: list[StartupReport]) -> None:
    """Raise if a child has failed, a ConfigError first: other failures may be consequences."""
    failed = [report for report in reports if report.failure is not None]
    for report in failed:
        if report.is_config_error:
            raise ConfigError(report.failure)
    if failed:
        raise EngineFailed(failed[0].failure)
