"""Child processes: they start together, are ready together, and all end when one dies.

Owns the processes. Each child reports over a pipe, in JSON, that it is ready or why it cannot
start. No child outlives this process (`die_with_parent`). None outlives another one for long: the
rest of a tensor-parallel group would wait for the dead rank in a collective, which nothing but the
end of a process interrupts.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pkgutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

import msgspec

from minisgl.errors import ConfigError, EngineFailed, MiniSGLError
from minisgl.utils.arch import die_with_parent, name_process
from minisgl.utils.logger import set_up_logging

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0


class TokenizerInfo(msgspec.Struct, frozen=True):
    """What the API server needs to know of a tokenizer.

    Attributes:
        added_tokens: ids of the tokens that are never split, such as `<|im_end|>`, by their texts.
        describes_tools: whether it describes tools in Hermes' form, since the template cannot.
        call_format: name of the format in which its prompts have calls of tools, if it is known.
    """

    chat_template: str | None
    added_tokens: dict[str, int]
    describes_tools: bool = False
    call_format: str | None = None


class StartupReport(msgspec.Struct, frozen=True):
    """A child's message once it is ready, or once it has failed.

    Attributes:
        failure: why it failed; None if it is ready.
        is_config_error: whether options or model are the reason, which the user can change.
        max_seq_len: of a scheduler.
        tokenizer: of a tokenizer.
    """

    failure: str | None = None
    is_config_error: bool = False
    max_seq_len: int | None = None
    tokenizer: TokenizerInfo | None = None


Ready = Callable[[StartupReport], None]


@dataclass(frozen=True, slots=True)
class _Child:
    """A process, and the reading end of the pipe for its reports."""

    process: SpawnProcess
    reader: Connection

    def read_report(self) -> StartupReport | None:
        """Wait for a report. None if the process has closed its end before."""
        try:
            return msgspec.json.decode(self.reader.recv_bytes(), type=StartupReport)
        except EOFError:
            return None


class Supervisor:
    """A set of named children.

    `start` them, `wait_ready`, then `watch` for the first death in an event loop, or
    `end_together`. At the end of the `with` block they have a few seconds to end; then they are
    killed. After an error they are killed at once.
    """

    def __init__(self, log_level: str) -> None:
        self._log_level = log_level
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, _Child] = {}
        self._guard: threading.Thread | None = None
        self._is_stopping = False
        self._death = ""

    @property
    def sentinels(self) -> list[int]:
        """A descriptor for each child, which can be read when the child has died."""
        return [child.process.sentinel for child in self._children.values()]

    def start(self, name: str, body: str, *args: Any) -> None:
        """Run body(ready, *args) in a new process. It calls ready(StartupReport) once it can work.

        Args:
            body: "module:function". Only the new process imports the module.
        """
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_run_worker,
            args=(name, os.getpid(), writer, self._log_level, body, *args),
            name=name,
            daemon=True,
        )
        process.start()
        writer.close()
        self._children[name] = _Child(process, reader)

    def wait_ready(self, timeout_s: float) -> list[StartupReport]:
        """Wait for the report of every child.

        Raises:
            ConfigError: a child cannot run with these options or this model.
            EngineFailed: a child died or was not ready in time; the message names it.
        """
        deadline = time.monotonic() + timeout_s
        waiting = {child.reader: name for name, child in self._children.items()}
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
        return reports

    async def watch(self) -> str:
        """Wait until a child dies, and kill the others.

        Returns:
            the name of the first and its exit code, as a sentence.
        """
        loop = asyncio.get_running_loop()
        has_died = asyncio.Event()
        sentinels = self.sentinels
        for sentinel in sentinels:
            loop.add_reader(sentinel, has_died.set)
        try:
            await has_died.wait()
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)
        return self._end_after_a_death()

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
        dead = set(wait(self.sentinels, timeout=0))
        names = [name for name in self._children if self._child_sentinel(name) in dead]
        # Others may have failed since, because they lack the first. It was rather killed than
        # that it failed in the same way.
        first = min(names, key=self._exit_code)
        description = self._describe_death(first)
        for child in self._children.values():
            child.process.kill()
        return description

    def _child_sentinel(self, name: str) -> int:
        return self._children[name].process.sentinel

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
        report = child.read_report() if child.reader.poll() else None
        death = f"{name} died with exit code {code}"
        if -code in set(signal.Signals):
            death += f" ({signal.Signals(-code).name})"
        if report and report.failure:
            death += f": {report.failure}"
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
        for child in self._children.values():
            child.reader.close()
        self._children.clear()


def _raise_failure(reports: list[StartupReport]) -> None:
    """Raise if a child has failed, a ConfigError first: other failures may be consequences."""
    failed = [report for report in reports if report.failure is not None]
    for report in failed:
        if report.is_config_error:
            raise ConfigError(report.failure)
    if failed:
        raise EngineFailed(failed[0].failure)


def _run_worker(
    name: str,
    parent_pid: int,
    writer: Connection,
    log_level: str,
    body: str,
    *args: Any,
) -> None:
    """Entry of every child: run its body, and report an error that ends it.

    Ctrl-C reaches all processes of a terminal. Children ignore it; the parent ends them in order.
    """
    die_with_parent(parent_pid)
    name_process(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging(name, log_level)

    def send(report: StartupReport) -> None:
        writer.send_bytes(msgspec.json.encode(report))

    try:
        pkgutil.resolve_name(body)(send, *args)
    except Exception as error:  # the border of the process; the supervisor acts on the report
        if isinstance(error, MiniSGLError):
            logger.debug("%s", traceback.format_exc())
            reason = str(error)
        else:
            logger.exception("%s fails", name)
            reason = f"{name}: {type(error).__name__}: {error}"
        send(StartupReport(failure=reason, is_config_error=isinstance(error, ConfigError)))
        writer.close()
        os._exit(1)
