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

PATIENCE_S = 60.0
MODEL = "tiny"
ROWS = 3
PLACES = 40


def eventually(holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Wait until something holds; what it is then."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


class Program:
    """`python -m minisgl` with these arguments, in a temporary folder and a session of its own.

    What is left of it at the end of the `with` block is killed.
    """

    def __init__(self, *argv: str, env: dict[str, str] | None = None, **streams: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t-"))  # of a short name: it holds sockets
        self._log = self.folder / "stderr"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", *argv],
                env={**os.environ, "TMPDIR": str(self.folder), **(env or {})},
                stderr=log,
                start_new_session=True,
                **streams,
            )
        self._family: set[psutil.Process] = set()

    @property
    def stderr(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> Self:
        """Until it says where it serves and does."""
        eventually(lambda: self._url or self.process.poll() is not None, "it serves")
        assert self._url, f"ended with {self.process.returncode}:\n{self.stderr}"
        eventually(self.is_healthy, "it answers")
        self.know_workers()
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
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    def has_all_places(self) -> bool:
        """Whether as many requests may be open as there can be: none has kept its place."""
        body = endless(prompt=["a"] * PLACES, max_tokens=1)
        return (
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code
            == 200
        )

    def workers(self) -> list[psutil.Process]:
        """The schedulers by rank, the detokenizer, the tokenizers: in the order of their start."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(
            (child for child in children if "spawn_main" in " ".join(child.cmdline())),
            key=lambda child: child.pid,
        )

    def know_workers(self) -> None:
        """Remember those that run now, to see whether they are left at the end."""
        self._family |= {psutil.Process(self.process.pid), *self.workers()}

    def wait(self) -> int:
        """Until it ends; its exit code."""
        return self.process.wait(PATIENCE_S)

    def assert_nothing_is_left(self, *, folder: bool = False) -> None:
        """No process that it ever had, and no folder unless it had no chance to remove it."""
        assert self._family
        eventually(lambda: all(map(_has_ended, self._family)), f"all of {self._family} end")
        if not folder:
            assert list(self.folder.glob("minisgl-*")) == []

    def client(self, api_key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)

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


def small(folder: Path, *more: str) -> list[str]:
    """Arguments to serve a tiny checkpoint with few rows and places and a free port."""
    return [
        *(
            "--model",
            str(folder),
            "--served-model-name",
            MODEL,
            "--port",
            "0",
            "--dtype",
            "float32",
        ),
        *(
            "--page-size",
            "4",
            "--num-pages",
            "8192",
            "--max-running-requests",
            str(ROWS),
            "--max-body-mb",
            "1",
        ),
        *("--max-open-requests", str(PLACES)),
        *more,
    ]


def endless(**fields: Any) -> dict[str, Any]:
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
def open_stream(program: Program, **fields: Any) -> Iterator[Iterator[Any]]:
    """The events of an endless stream, the first of which has come. Leaving it hangs up."""
    body = endless(stream=True, **fields)
    with httpx.stream(
        "POST", f"{program.url}/v1/completions", json=body, timeout=PATIENCE_S
    ) as response:
        assert response.status_code == 200, response.read()
        events = (
            json.loads(line[6:])
            for line in response.iter_lines()
            if line and line != "data: [DONE]"
        )
        next(events)
        yield events
