"""The processes of a server on this machine: their start, their names, and which ones are left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Self

import psutil

TIMEOUT_S = 600.0
CHECK_EVERY_S = 0.1
Ask = Callable[[], int]
_WORKERS = ("scheduler-", "tokenizer-", "detokenizer")


def is_healthy(host: str) -> bool:
    """Whether /health of a host, with its port, is a 200 now."""
    try:
        with closing(HTTPConnection(host, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False


def wait_for_health(host: str, expected: bool) -> None:
    """Wait until the server accepts requests, or with `expected` false until it does not.

    Raises:
        TimeoutError: that takes longer than `TIMEOUT_S`.
    """
    wait_until(lambda: is_healthy(host) == expected, f"/health is {expected}")


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Call a function until it returns true.

    Raises:
        TimeoutError: it never did.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(CHECK_EVERY_S)


def wait_for_recovery(server: psutil.Process, name: str, failed: psutil.Process, ask: Ask) -> None:
    """Wait until a worker that fails has a successor, and the server answers requests again.

    Args:
        ask: sends a request through all workers; returns the status of its answer.

    Raises:
        TimeoutError: that takes longer than `TIMEOUT_S`.
    """
    wait_until(lambda: workers_of(server).get(name, failed) != failed, f"{name} is replaced")
    wait_until(lambda: ask() == HTTPStatus.OK, "requests are answered")


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process like an exception, through every `with` block."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def workers_of(server: psutil.Process) -> dict[str, psutil.Process]:
    """The schedulers, tokenizers and the detokenizer of a server, by their names."""
    named = dict(map(_named, server.children(recursive=True)))
    return {name: named[name] for name in sorted(named) if name.startswith(_WORKERS)}


def _named(process: psutil.Process) -> tuple[str, psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.name(), process
    return "ended", process


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or is a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def what_is_left(processes: Iterable[psutil.Process], within_s: float) -> list[str]:
    """The processes that have not ended within a time."""
    waited = list(processes)
    with suppress(TimeoutError):
        wait_until(lambda: all(map(has_ended, waited)), "all processes end", within_s)
    return [str(process) for process in waited if not has_ended(process)]


class StartedServer:
    """`python -m minisgl` with a temporary folder and a session of its own.

    The end of a `with` block kills the remaining processes, and removes the folder.

    Args:
        argv: the server's options.
        env: variables in addition to those of this process.

    Attributes:
        process: the server's first process.
        temporary: its folder for temporary files; no other program writes there.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="s-"))  # short: sockets have short names
        self.temporary = self._folder / "t"
        self.temporary.mkdir()
        self._log = self._folder / "stderr"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", *argv],
                env={**os.environ, "TMPDIR": str(self.temporary), **(env or {})},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """The server's output so far."""
        return self._log.read_text(errors="replace")

    @property
    def host(self) -> str:
        """The address and port; empty until the server listens."""
        served = re.search(r"is served at http://([^/\s]+)/v1", self.log)
        return served[1] if served else ""

    def wait_ready(self) -> Self:
        """Wait until the server accepts requests.

        Raises:
            ChildProcessError: the server has ended.
        """
        wait_until(lambda: self._has_ended() or bool(self.host), "the server serves")
        if self._has_ended():
            last_lines = "\n".join(self.log.splitlines()[-5:])
            raise ChildProcessError(
                f"the server ended with {self.process.returncode}:\n{last_lines}"
            )
        wait_for_health(self.host, expected=True)
        return self

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
