"""Watches a server, as its other clients see it, during an attack or a failure."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Self

import psutil

from minisgl.benchmark.stress.target import Server

_CHECK_EVERY_S = 0.02
_SAMPLE_EVERY_S = 0.25
_LOOK_EVERY_S = 0.002
_STALL_S = 0.03  # far above what the scheduler lets a thread wait that sleeps most of the time
_RETRY_S = 0.05


class Watch(ABC):
    """A thread that watches, from the beginning of a `with` block to its end."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()
        self._thread.join()

    def _end(self) -> None:
        """End the thread, wherever it waits."""
        self._stop.set()

    @abstractmethod
    def _run(self) -> None:
        """Watch until `_stop` is set."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval, in times of `time.perf_counter`."""

    begin: float
    end: float

    @property
    def duration_s(self) -> float:
        return self.end - self.begin

    def overlaps(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end


class MachineWatch(Watch):
    """Sleeps two milliseconds on each processor, again and again, and notes when that took longer.

    Then that processor itself stood still, as those of virtual machines do, and no server could
    have answered from it.

    Attributes:
        stalls: the intervals in which a processor stood still.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stalls: list[Span] = []

    @property
    def longest_s(self) -> float:
        return max((stall.duration_s for stall in self.stalls), default=0.0)

    def _run(self) -> None:
        threads = [
            threading.Thread(target=self._watch_processor, args=(processor,), daemon=True)
            for processor in os.sched_getaffinity(0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _watch_processor(self, processor: int) -> None:
        os.sched_setaffinity(0, {processor})  # of this thread
        last_look = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(_LOOK_EVERY_S)
            now = time.perf_counter()
            if now - last_look > _STALL_S:
                self.stalls.append(Span(last_look, now))
            last_look = now


class HealthWatch(Watch):
    """Asks for /health every 20 ms on a connection that is kept.

    A check that is answered late delays those that were due meanwhile. These count from the time
    when they were due, so that a long wait counts as many bad checks.

    Attributes:
        checks: the interval of each, from the time when it was due to its answer.
        num_failed: checks without a good answer; their waits count, too.
    """

    def __init__(self, server: Server, timeout_s: float = 60.0) -> None:
        super().__init__()
        self._server = server
        self._timeout_s = timeout_s
        self.checks: list[Span] = []
        self.num_failed = 0

    def _run(self) -> None:
        connection = self._server.connect(self._timeout_s)
        due = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(max(0.0, due - time.perf_counter()))
            sent = time.perf_counter()
            if not _is_healthy(connection):
                self.num_failed += 1
                connection.close()
            answered = time.perf_counter()
            while due <= sent:
                self.checks.append(Span(due, answered))
                due += _CHECK_EVERY_S
        connection.close()

    def undisturbed(self, stalls: list[Span]) -> list[Span]:
        """The checks during which the machine did not stand still."""
        return [check for check in self.checks if not any(map(check.overlaps, stalls))]


def quantile_s(checks: list[Span], share: float) -> float:
    """The wait that this share of the checks did not exceed; 0 if there are none."""
    waits_s = sorted(check.duration_s for check in checks)
    if not waits_s:
        return 0.0
    return waits_s[min(len(waits_s) - 1, int(share * len(waits_s)))]


def _is_healthy(connection: HTTPConnection) -> bool:
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
    except (OSError, HTTPException):
        return False
    return response.status == 200


class NeighbourWatch(Watch):
    """Reads a stream of a text completion, and another one when it ends.

    Attributes:
        num_chunks: of all streams.
        num_broken: streams that were refused or did not come to their end.
    """

    def __init__(self, server: Server, timeout_s: float = 60.0) -> None:
        super().__init__()
        self._server = server
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._last_chunk: float | None = None  # None between two streams
        self._largest_gap_s = 0.0
        self._has_chunk = threading.Event()
        self.num_chunks = 0
        self.num_broken = 0

    def wait_for_chunk(self) -> None:
        """Wait until a stream has begun."""
        if not self._has_chunk.wait(self._timeout_s):
            raise TimeoutError(f"no chunk of a stream came within {self._timeout_s:g} s")

    @property
    def largest_gap_s(self) -> float:
        """The largest time between two chunks of a stream, or since the last one if it is open."""
        since_s = time.perf_counter() - self._last_chunk if self._last_chunk is not None else 0.0
        return max(self._largest_gap_s, since_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read_stream()
            except (OSError, HTTPException, ValueError):  # ValueError: http.client's closed file
                self.num_broken += not self._stop.is_set()
                self._stop.wait(_RETRY_S)
        if self._last_chunk is not None:
            self._largest_gap_s = self.largest_gap_s
            self._last_chunk = None

    def _read_stream(self) -> None:
        connection = self._server.connect(self._timeout_s)
        try:
            response = self._open(connection)
            for line in response:
                if self._stop.is_set():
                    return
                if line.startswith(b"data: {"):
                    self._note_chunk()
            self._last_chunk = None
        finally:
            connection.close()

    def _open(self, connection: HTTPConnection) -> HTTPResponse:
        fields: dict[str, Any] = {
            "prompt": "the dog",
            "max_tokens": self._server.context - 16,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection.connect()
        self._socket = connection.sock
        body = self._server.body(**fields)
        connection.request("POST", "/v1/completions", body, self._server.headers())
        response = connection.getresponse()
        if response.status != 200:
            raise HTTPException(f"the neighbour got a {response.status}")
        return response

    def _note_chunk(self) -> None:
        now = time.perf_counter()
        if self._last_chunk is not None:
            self._largest_gap_s = max(self._largest_gap_s, now - self._last_chunk)
        self._last_chunk = now
        self.num_chunks += 1
        self._has_chunk.set()

    def _end(self) -> None:
        super()._end()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class MemoryWatch(Watch):
    """Samples the resident memory of a process and of those that it has started.

    Args:
        pid: None watches nothing, and all numbers stay 0.

    Attributes:
        before, peak, now: bytes.
    """

    def __init__(self, pid: int | None) -> None:
        super().__init__()
        self._pid = pid
        self.before = self.peak = self.now = self._sample()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self.now = self._sample()
            self.peak = max(self.peak, self.now)

    def _sample(self) -> int:
        if self._pid is None:
            return 0
        root = psutil.Process(self._pid)
        return sum(map(_resident_bytes, [root, *root.children(recursive=True)]))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        num_bytes: int = process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
    return num_bytes


def num_engine_requests(server: Server, timeout_s: float = 60.0) -> int:
    """The number of prompts that run or wait in the engine, by /metrics."""
    connection = server.connect(timeout_s)
    try:
        connection.request("GET", "/metrics", headers=server.headers())
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    gauges = ("minisgl_requests_running ", "minisgl_requests_waiting ")
    return sum(int(float(line.split()[1])) for line in lines if line.startswith(gauges))


def context_of(server: Server, timeout_s: float = 60.0) -> int:
    """The model's context in tokens, by /tokenize."""
    status, answer = server.post("/tokenize", server.body(prompt="a"), timeout_s)
    if status != 200:
        raise ConnectionError(f"/tokenize answers with {status}: {answer[:200]!r}")
    max_model_len: int = json.loads(answer)["max_model_len"]
    return max_model_len
