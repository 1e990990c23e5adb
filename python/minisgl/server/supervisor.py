"""Child processes: started together, ready together, and when one dies the others follow.

Owns the processes and the sockets' folder. Children report over a pipe of their own, in JSON: that they are ready, or
why they cannot be. They cannot outlive this process (`die_with_parent`).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from minisgl.errors import ConfigError, EngineFailed

logger = logging.getLogger(__name__)

_EXIT_PATIENCE_S = 5.0


class Report(msgspec.Struct, frozen=True):
    """What a child says at its start: ready with some facts, or the reason why not."""

    failure: str | None = None
    is_users_fault: bool = False
    max_seq_len: int | None = None


class Supervisor:
    """A set of named children.

    `start` them, `wait_ready`, then `watch` for the first death; `stop` ends all in any state.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, tuple[SpawnProcess, Connection]] = {}

    def start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Run target(name, parent_pid, connection, *args) in a new process; only what is pickled here is passed."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=target, args=(name, os.getpid(), theirs, *args), name=name, daemon=True)
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
                raise EngineFailed(f"{', '.join(waiting.values())} not ready after {timeout_s:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                reports.append(self._read_report(waiting.pop(connection), connection))
        return reports

    def _read_report(self, name: str, connection: Connection) -> Report:
        try:
            report = msgspec.json.decode(connection.recv_bytes(), type=Report)
        except EOFError:
            raise EngineFailed(self._obituary(name)) from None
        if report.failure is not None:
            raise (ConfigError if report.is_users_fault else EngineFailed)(report.failure)
        return report

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
                msgspec.json.decode(connection.recv_bytes(), type=Report).failure if connection.poll() else None
            )
        except EOFError:
            last_words = None
        return f"{name} died with exit code {process.exitcode}" + (f": {last_words}" if last_words else "")

    def stop(self, *, patiently: bool) -> None:
        """End all children. Patiently: they were told to and get some seconds before they are killed."""
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
