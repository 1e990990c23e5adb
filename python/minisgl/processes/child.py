"""The child's side of a process: it reports that it is ready, or why it is not, and beats.

A child may stand by: it imports what takes long, and waits for the assignment that says what it is
to be. `supervisor.py` is the parent's side.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pkgutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import msgspec

from minisgl.errors import ConfigError, MiniSGLError
from minisgl.utils.bytecode import keep_bytecode
from minisgl.utils.excerpts import with_utf8
from minisgl.utils.garbage import keep_imports, start_process
from minisgl.utils.logger import rename_in_log, set_up_logging
from minisgl.utils.threads import lack_of_threads_is_explained

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_NAME = 15
BEAT_INTERVAL_S = 0.5
_END_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class StartupReport(msgspec.Struct, frozen=True):
    """A child's message once it is ready, or once it has failed.

    Attributes:
        failure: why it failed; None if it is ready.
        is_config_error: whether options or model are the reason, which the user can change.
        is_explained: whether the package itself found the reason. Any other failure may be the
            consequence of another child's.
        info: what a child that is ready reports of itself, encoded for the process that started
            it.
    """

    failure: str | None = None
    is_config_error: bool = False
    is_explained: bool = False
    info: bytes = b""


class Ready:
    """A child's way to its supervisor: call it with a report, then beat."""

    def __init__(self, writer: Connection, beats: ctypes.c_ulong) -> None:
        self._writer = writer
        self._beats = beats

    def __call__(self, report: StartupReport) -> None:
        self._writer.send_bytes(msgspec.json.encode(report))

    def beat(self) -> None:
        """Say that this process goes on: one more in shared memory, without a lock."""
        self._beats.value += 1


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task of a child that stands by: the arguments of `Supervisor.start`."""

    name: str
    body: str
    args: tuple[Any, ...]


def run_child(
    name: str,
    parent_pid: int,
    writer: Connection,
    beats: ctypes.c_ulong,
    log_level: str,
    log_json: bool,
    body: str,
    *args: Any,
) -> None:
    """Entry of every child: run its body, and report an error that ends it.

    Ctrl-C reaches all processes of a terminal, and SIGTERM may reach all of a group. Children
    ignore both; the parent ends them in order.
    """
    die_with_parent(parent_pid)
    name_process(name)
    ignore_end_signals()
    set_up_logging(name, log_level, as_json=log_json)
    logger.debug("the process runs")
    start_process()
    keep_bytecode()

    ready = Ready(writer, beats)
    try:
        with lack_of_threads_is_explained():
            with keep_imports():
                run = pkgutil.resolve_name(body)
            logger.debug("%s is imported", body)
            run(ready, *args)
    except Exception as error:  # the border of the process; the supervisor acts on the report
        name = multiprocessing.current_process().name  # a child that stood by has another one
        if isinstance(error, MiniSGLError):
            logger.debug("%s", traceback.format_exc())
            reason = str(error)
        else:
            logger.exception("%s fails", name)
            reason = f"{name}: {type(error).__name__}: {error}"
        ready(
            StartupReport(
                failure=with_utf8(reason),
                is_config_error=isinstance(error, ConfigError),
                is_explained=isinstance(error, MiniSGLError),
            )
        )
        writer.close()
        os._exit(1)


def stand_by(ready: Ready, preparation: str, pipe: Connection) -> None:
    """Body of a child: prepare, then wait for an `Assignment`, confirm it, and carry it out.

    Args:
        preparation: "module:function", without arguments.
    """
    pkgutil.resolve_name(preparation)()
    ready(StartupReport())
    while not pipe.poll(BEAT_INTERVAL_S):
        ready.beat()
    assignment: Assignment = pipe.recv()
    pipe.close()
    ready(StartupReport())
    multiprocessing.current_process().name = assignment.name
    name_process(assignment.name)
    rename_in_log(assignment.name)
    logger.debug("the process stood by")
    pkgutil.resolve_name(assignment.body)(ready, *assignment.args)


@contextmanager
def end_signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread, and in each process that it starts meanwhile.

    Ctrl-C reaches all processes of a terminal, and some tools send SIGTERM to a whole group of
    processes. One that has not come to `ignore_end_signals` would end by it.
    """
    # Else Python starts its tracker with the first process, and unblocks the signals.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def at_exit(kill: Callable[[], None]) -> Finalize:
    """Kill children that ignore signals when this process ends, unless that is cancelled before.

    Python would send them SIGTERM, and then wait for them forever.
    """
    return Finalize(None, kill, exitpriority=10)


def ignore_end_signals() -> None:
    """Ignore SIGINT and SIGTERM, which may be blocked since the start of this process."""
    for number in _END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends in any way (Linux).

    The kernel takes the thread that has started this process for its parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call above
        os._exit(1)


def name_process(name: str) -> None:
    """Show `name`, up to 15 bytes of it, in `top` and `ps` in place of the program (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode())
