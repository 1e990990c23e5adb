"""The program as a user starts it: a command, its stderr, its port, its processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from openai import OpenAI

TIMEOUT_S = 60.0
# Schedulers import torch while other tests start servers, too: 60 s were too few on a slow machine.
START_TIMEOUT_S = 240.0
MODEL = "tiny"
MAX_RUNNING = 3
MAX_OPEN = 40


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Call a function until it returns something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


class Program:
    """`python -m minisgl` with these arguments, in a temporary folder and a session of its own.

    The end of the `with` block kills whatever process is left.
    """

    def __init__(self, *argv: str, env: dict[str, str] | None = None, **streams: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets have short names
        self._log = self.folder / "stderr"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", *argv],
                env={**os.environ, "TMPDIR": str(self.folder), **(env or {})},
                stderr=log,
                start_new_session=True,
                **streams,
            )
        self._processes: set[psutil.Process] = set()

    @property
    def stderr(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Wait until it has logged its address and answers there."""
        wait_until(lambda: self._url or self.process.poll() is not None, "it serves", timeout_s)
        assert self._url, f"ended with {self.process.returncode}:\n{self.stderr}"
        wait_until(self.is_healthy, "it answers")
        self.remember_processes()
        return self

    @property
    def _url(self) -> str | None:
        served = re.search(r"is served at (http://\S+)/v1", self.stderr)
        return served and served[1]

    @property
    def url(self) -> str:
        assert self._url
        return self._url

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def is_idle(self) -> bool:
        """Whether no request is open: MAX_OPEN prompts, as many as may be, are accepted at once."""
        body = endless_body(prompt=["a"] * MAX_OPEN, max_tokens=1)
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        return response.status_code == 200

    def workers(self) -> dict[str, psutil.Process]:
        """Schedulers, detokenizer, tokenizers and what they have started, by their names."""
        named = {}
        for process in self._descendants():
            with suppress(psutil.NoSuchProcess):
                named[process.name()] = process
        return named

    def _descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def remember_processes(self) -> None:
        """Add the processes that run now to those that must have ended at the end."""
        self._processes |= {psutil.Process(self.process.pid), *self._descendants()}

    def wait(self) -> int:
        """Wait until it ends; return its exit code."""
        return self.process.wait(TIMEOUT_S)

    def assert_nothing_is_left(self, *, folder: bool = False) -> None:
        """No process is left, and no folder unless `folder`: a killed program leaves that."""
        assert self._processes
        wait_until(lambda: all(map(_has_ended, self._processes)), f"all of {self._processes} end")
        if not folder:
            assert list(self.folder.glob("minisgl-*")) == []

    def client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            print(f"--- stderr of the program:\n{self.stderr}")
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def small_server(folder: Path, *more: str) -> list[str]:
    """Arguments to serve a tiny checkpoint on a free port, with few requests at a time."""
    options = {
        "--model": folder,
        "--served-model-name": MODEL,
        "--port": 0,
        "--dtype": "float32",
        "--page-size": 4,
        "--num-pages": 8192,
        "--max-running-requests": MAX_RUNNING,
        "--max-open-requests": MAX_OPEN,
        "--max-body-mb": 1,
    }
    return [str(word) for option in options.items() for word in option] + list(more)


def endless_body(**fields: Any) -> dict[str, Any]:
    """The body of a text completion that takes far longer than a test."""
    return {
        "model": MODEL,
        "prompt": "the dog",
        "max_tokens": 15_000,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


@contextmanager
def open_stream(
    program: Program, headers: dict[str, str] | None = None, **fields: Any
) -> Iterator[Iterator[Any]]:
    """The events of an endless stream, the first of which has come. Leaving it hangs up."""
    body = endless_body(stream=True, **fields)
    url = f"{program.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        events = (
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line not in ("", "data: [DONE]")
        )
        next(events)
        yield events
