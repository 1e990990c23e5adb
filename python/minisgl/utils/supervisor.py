"""Child processes: they start together, are ready together, and their ends are noticed.

Owns the processes. Each child reports over a pipe, in JSON, that it is ready or why it cannot
start. No child outlives this process (`die_with_parent`). The rest of a tensor-parallel group would
wait for a dead rank in a collective, which nothing but the end of a process interrupts: so `LLM`
lets all children end with the first. The server asks for the next failure, and decides which
children it kills and starts again.

A child that lives may still hang. Each has a counter in shared memory, its *beat*, which it raises
whenever it looks for messages. If it stands still for too long, the child is killed.

Where an import takes seconds, a child may stand by that has done it, and take the place of one that
has failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec

from minisgl.errors import ConfigError, EngineFailed
from minisgl.utils.child import Order, StartupReport, interrupts_blocked, run_child

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0
_TICK_S = 0.5
_MAX_STILL_TICKS = 4  # of a child that stands by and shall take over
_SPREAD_TICKS = 3  # after which those that wait for a child that hangs have stopped, too


@dataclass(slots=True)
class _Child:
    """A process, the reading end of the pipe for its reports, and its beat.

    Attributes:
        orders: the writing end of the pipe for its order, while it stands by.
        is_starting: it has not reported that it is ready.
        failure: its report of its failure.
        num_still_ticks: since its beat was seen to move.
    """

    process: SpawnProcess
    reader: Connection
    beats: ctypes.c_ulong
    orders: Connection | None = None
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


@dataclass(frozen=True, slots=True)
class Failure:
    """A child that died or hung: its name, and what happened, as a clause.

    Attributes:
        is_at_start: whether it was not ready yet.
    """

    name: str
    reason: str
    is_at_start: bool = False


class _Starter:
    """A thread that starts processes: they die with the thread that has started them.

    The caller's may end long before.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[SpawnProcess, Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="starter", daemon=True)
        self._thread.start()

    def start(self, process: SpawnProcess) -> None:
        """Start a process. An interrupt is raised when it has been started."""
        started: Future[None] = Future()
        self._work.put((process, started))
        try:
            started.result()
        except BaseException:
            futures.wait([started])
            raise

    def end(self) -> None:
        """End the thread, and what it has started and is still alive."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while work := self._work.get():
            process, started = work
            try:
                with interrupts_blocked():
                    process.start()
            except BaseException as error:
                started.set_exception(error)
            else:
                started.set_result(None)


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
        self._children: dict[str, _Child] = {}
        self._starter = _Starter()
        self._guard: threading.Thread | None = None
        self._is_stopping = False
        self._death = ""

    @property
    def sentinels(self) -> list[int]:
        """A descriptor for each child, which can be read when the child has died."""
        return [child.process.sentinel for child in self._children.values()]

    def start(self, name: str, body: str, *args: Any, has_children: bool = False) -> None:
        """Run body(ready, *args) in a new process. It calls ready(StartupReport) once it can work.

        Garbage is not collected until it calls `start_serving`.

        Args:
            body: "module:function". Only the new process imports the module.
            has_children: whether it starts processes by multiprocessing.
        """
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
        self._children[name] = _Child(process, reader, beats)  # first: a signal may end `start`
        self._starter.start(process)
        writer.close()

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
                self.start(name, "minisgl.utils.child:stand_by", preparation, receiver)
            except OSError:
                sender.close()
                child = self._children.pop(name, None)
                if child is not None:
                    child.reader.close()
                raise
        self._children[name].orders = sender

    def has_child(self, name: str) -> bool:
        return name in self._children

    def is_prepared(self, name: str) -> bool:
        """Whether a child stands by, is prepared, and has beaten in the last two seconds."""
        child = self._children.get(name)
        if child is None or child.is_starting or not child.process.is_alive():
            return False
        return child.num_still_ticks <= _MAX_STILL_TICKS

    def employ(self, standby: str, name: str, body: str, *args: Any) -> None:
        """Let a child that stands by be what `start` would start."""
        child = self._children.pop(standby)
        assert child.orders
        self._children[name] = child
        child.process.name = name
        child.is_starting = True
        child.num_still_ticks = 0
        orders = child.orders
        child.orders = None
        with orders, suppress(BrokenPipeError):  # it has died since: `wait_ready` says so
            orders.send(Order(name, body, args))

    def wait_ready(self, timeout_s: float) -> list[StartupReport]:
        """Wait for the report of every child that was started since the last call.

        Raises:
            ConfigError: a child cannot run with these options or this model.
            EngineFailed: a child died or was not ready in time; the message names it.
        """
        deadline = time.monotonic() + timeout_s
        starting = {name: child for name, child in self._children.items() if child.is_starting}
        waiting = {child.reader: name for name, child in starting.items()}
        reports: list[StartupReport] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(waiting.values())
                raise EngineFailed(f"{names} not ready after {timeout_s:.0f} s")
            for reader in ready:
                assert isinstance(reader, Connection)
                name = waiting.pop(reader)
                report = self._children[name].read_report()
                reports.append(report or StartupReport(failure=self._describe_death(name)))
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
        """Wait until a child dies, or hangs for so long and is killed.

        Children may be starting. This method reads their reports: a report of a failure gives its
        reason, any other says that the child is ready. Time counts only while this process runs
        too: a machine may sleep.

        Args:
            start_timeout_s: until a child that is starting must be ready.
            at_tick: is called twice a second. It may start children.
        """
        hang_reasons: dict[str, str] = {}
        while not self._dead_children():
            await self._wait_for_a_sentinel(_TICK_S)
            for name, child in self._children.items():
                self._look_for_reports(name, child)
                child.tick()
                limit_s = start_timeout_s if child.is_starting else hang_timeout_s
                if child.num_still_ticks * _TICK_S >= limit_s:
                    names = " and ".join(self._still_beside(child))
                    hang_reasons[name] = f"{names} did nothing for {limit_s:g} s"
                    child.process.kill()
            at_tick()
        first = self._first_death()
        reason = hang_reasons.get(first) or self._describe_death(first)
        return Failure(first, reason, self._children[first].is_starting)

    def _still_beside(self, hung: _Child) -> list[str]:
        """The names of the children that stand still since about the same time.

        Ranks wait for one that hangs, so any of them may be the one.
        """
        since = hung.num_still_ticks - _SPREAD_TICKS
        alike = {
            name: child
            for name, child in self._children.items()
            if child.is_starting == hung.is_starting
        }
        return [name for name, child in alike.items() if child.num_still_ticks > since]

    def _look_for_reports(self, name: str, child: _Child) -> None:
        """Note that a child is ready, or why it has failed."""
        while child.reader.poll():
            report = child.read_report()
            if report is None:
                return
            if report.failure:
                child.failure = report
            else:
                child.is_starting = False
                child.num_still_ticks = 0
                logger.info("%s is ready", name)

    async def _wait_for_a_sentinel(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        has_died = asyncio.Event()
        sentinels = self.sentinels
        for sentinel in sentinels:
            loop.add_reader(sentinel, has_died.set)
        try:
            async with asyncio.timeout(timeout_s):
                await has_died.wait()
        except TimeoutError:
            pass
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)

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
        child = self._children.pop(name)
        child.process.join()
        child.reader.close()
        if child.orders:
            child.orders.close()

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
            self._death = self._end_after_a_death()

    def _end_after_a_death(self) -> str:
        description = self._describe_death(self._first_death())
        self.kill()
        return description

    def _dead_children(self) -> list[str]:
        dead = set(wait(self.sentinels, timeout=0))
        return [name for name, child in self._children.items() if child.process.sentinel in dead]

    def _first_death(self) -> str:
        """The name of the child that probably died first.

        Others may have failed since, because they need it. A child that was killed comes before
        one that failed, since what lacks another child fails. Of those that failed, one that can
        explain its failure comes first.
        """
        return min(self._dead_children(), key=self._order_of_death)

    def _order_of_death(self, name: str) -> tuple[int, bool]:
        child = self._children[name]
        self._look_for_reports(name, child)
        return self._exit_code(name), not (child.failure and child.failure.is_explained)

    def _exit_code(self, name: str) -> int:
        """The exit code of a dead child, negative for a signal.

        `join` returns at once, without the code, while another thread of this program collects
        it: `multiprocessing.active_children` does so for all children.
        """
        process = self._children[name].process
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while process.exitcode is None and time.monotonic() < deadline:
            process.join(max(0.0, deadline - time.monotonic()))
        return 0 if process.exitcode is None else process.exitcode

    def _describe_death(self, name: str) -> str:
        """Exit code of a dead child, and its last report's reason."""
        child = self._children[name]
        code = self._exit_code(name)
        self._look_for_reports(name, child)
        death = f"{name} died with exit code {code}"
        if -code in set(signal.Signals):
            death += f" ({signal.Signals(-code).name})"
        if child.failure:
            death += f": {child.failure.failure}"
        return death

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
            if child.orders:  # it would wait for ever
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

    def _forget_unstarted(self) -> None:
        """Drop a child whose start a signal or an error has ended before it had a process."""
        for name in [name for name, child in self._children.items() if child.process.pid is None]:
            self._children.pop(name).reader.close()


def _raise_failure(reports: list[StartupReport]) -> None:
    """Raise if a child has failed, a ConfigError first: other failures may be consequences."""
    failed = [report for report in reports if report.failure is not None]
    for report in failed:
        if report.is_config_error:
            raise ConfigError(report.failure)
    if failed:
        raise EngineFailed(failed[0].failure)
