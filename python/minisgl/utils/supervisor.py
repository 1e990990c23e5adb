"""Child processes: started together, ready together, and when one dies the others follow.

Owns the processes. Children report over a pipe of their own, in JSON: that they are ready, or
why they cannot be. They cannot outlive this process (`die_with_parent`).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pkgutil
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

import msgspec

from minisgl.errors import ConfigError, EngineFailed, MiniSGLError
from minisgl.utils.arch import die_with_parent
from minisgl.utils.logger import set_up_logging

logger = logging.getLogger(__name__)

_EXIT_PATIENCE_S = 5.0


class Vocabulary(msgspec.Struct, frozen=True):
    """What a tokenizer has that others need to know: its chat template, and the tokens that it never splits."""

    chat_template: str | None
    markers: dict[str, int]


class Report(msgspec.Struct, frozen=True):
    """What a child says at its start: ready with some facts, or the reason why not."""

    failure: str | None = None
    is_users_fault: bool = False
    max_seq_len: int | None = None
    vocabulary: Vocabulary | None = None


Ready = Callable[[Report], None]


class Supervisor:
    """A set of named children.

    `start` them, `wait_ready`, then `watch` for the first death. At the end of the `with` block those that do not end
    by themselves are killed: after a few seconds, or at once if the block ends with an error.
    """

    def __init__(self, log_level: str) -> None:
        self._log_level = log_level
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, tuple[SpawnProcess, Connection]] = {}

    def start(self, name: str, body: str, *args: Any) -> None:
        """Run body(ready, *args) in a new process. It calls ready(Report) once it can work.

        Args:
            body: "module:function", which nobody but the new process imports.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_run_worker,
            args=(name, os.getpid(), theirs, self._log_level, body, *args),
            name=name,
            daemon=True,
        )
        process.start()
        theirs.close()
        self._children[name] = (process, ours)

    def wait_ready(self, timeout_s: float) -> list[Report]:
        """Wait for the report of every child.

        Raises:
            ConfigError: a child cannot run with these options or this model.
            EngineFailed: a child died, or the time is over; names who.
        """
        deadline = time.monotonic() + timeout_s
        waiting = {ours: name for name, (_, ours) in self._children.items()}
        reports = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineFailed(
                    f"{', '.join(waiting.values())} not ready after {timeout_s:.0f} s"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                reports.append(self._read_report(waiting.pop(connection), connection))
            if failed := [report for report in reports if report.failure is not None]:
                cause = max(
                    failed, key=lambda report: report.is_users_fault
                )  # others may fail in consequence
                raise (ConfigError if cause.is_users_fault else EngineFailed)(cause.failure)
        return reports

    def _read_report(self, name: str, connection: Connection) -> Report:
        try:
            return msgspec.json.decode(connection.recv_bytes(), type=Report)
        except EOFError:
            return Report(failure=self._obituary(name))

    async def watch(self) -> str:
        """Return when the first child is dead; says which and how."""
        loop = asyncio.get_running_loop()
        dead: asyncio.Future[str] = loop.create_future()
        sentinels = {process.sentinel: name for name, (process, _) in self._children.items()}

        def on_death(name: str) -> None:
            if not dead.done():
                dead.set_result(name)

        for sentinel, name in sentinels.items():
            loop.add_reader(sentinel, on_death, name)
        try:
            return self._obituary(await dead)
        finally:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)

    def _obituary(self, name: str) -> str:
        process, connection = self._children[name]
        process.join(_EXIT_PATIENCE_S)
        try:
            last_words = (
                msgspec.json.decode(connection.recv_bytes(), type=Report).failure
                if connection.poll()
                else None
            )
        except EOFError:
            last_words = None
        return f"{name} died with exit code {process.exitcode}" + (
            f": {last_words}" if last_words else ""
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(patiently=kind is None)

    def _stop(self, *, patiently: bool) -> None:
        processes = [process for process, _ in self._children.values()]
        deadline = time.monotonic() + (_EXIT_PATIENCE_S if patiently else 0.0)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                logger.debug("%s is killed", process.name)
                process.kill()
        for process in processes:
            process.join()
        for _, connection in self._children.values():
            connection.close()
        self._children.clear()


def _run_worker(
    name: str,
    parent_pid: int,
    connection: Connection,
    log_level: str,
    body: str,
    *args: Any,
) -> None:
    """Entry of every child: tie it to its parent, run its body, and report what goes wrong before it is ready.

    Interrupts are the parent's affair: it asks the children to end.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging(name, log_level)

    def report(content: Report) -> None:
        connection.send_bytes(msgspec.json.encode(content))

    try:
        pkgutil.resolve_name(body)(report, *args)
    except Exception as error:  # the border of the process: said once, then the supervisor acts
        if isinstance(error, MiniSGLError):
            logger.debug("%s", traceback.format_exc())
        else:
            logger.exception("%s fails", name)
        reason = (
            str(error)
            if isinstance(error, MiniSGLError)
            else f"{name}: {type(error).__name__}: {error}"
        )
        report(Report(failure=reason, is_users_fault=isinstance(error, ConfigError)))
        connection.close()
        os._exit(1)
