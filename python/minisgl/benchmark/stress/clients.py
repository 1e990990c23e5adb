"""Clients that send one request after the other, check the answers, and hang up now and then."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import islice
from typing import Literal

from minisgl.benchmark.stress.asks import Ask
from minisgl.benchmark.stress.events import (
    WrongAnswer,
    events_of,
    read_to_the_end,
    require,
)
from minisgl.benchmark.stress.mix import Asker

Outcome = Literal["answered", "refused", "told", "left", "wrong", "hung"]
Leaving = Literal["sending", "waiting", "reading"]
_LEAVINGS: tuple[Leaving, ...] = ("sending", "waiting", "reading")
_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing resets the connection
_MAX_PROBLEMS = 50
_LONGEST_STAY_S = 2.0
_RETRY_S = 1.0
_MAX_SHOWN = 400  # characters of a request


@dataclass(slots=True)
class Tally:
    """The outcomes of requests.

    Attributes:
        outcomes: the number of requests by kind and outcome.
            answered: the whole answer came, and passed its checks.
            refused: a 4xx with an error, for a bad request or a 429 with `Retry-After`.
            told: a 503 with `Retry-After`, or a stream that ended with an error.
            left: the client hung up.
            wrong: anything else.
            hung: it took longer than the limit.
        told_s: when requests were told, by `time.perf_counter`.
        problems: the first errors.
        longest_s: the longest time that a request took.
    """

    outcomes: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    told_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, outcome: Outcome, took_s: float, problem: str = "") -> None:
        with self._lock:
            self.outcomes[kind, outcome] += 1
            self.longest_s = max(self.longest_s, took_s)
            if outcome == "told":
                self.told_s.append(time.perf_counter())
            if problem and len(self.problems) < _MAX_PROBLEMS:
                self.problems.append(f"{kind}: {problem}")

    def count(self, outcome: Outcome) -> int:
        with self._lock:
            return sum(count for (_, each), count in self.outcomes.items() if each == outcome)

    @property
    def num_failed(self) -> int:
        return self.count("wrong") + self.count("hung")


@dataclass(slots=True)
class Client:
    """One client, for a thread.

    Attributes:
        host: with its port.
        api_keys: each request has one of them, if there are any.
        limit_s: how long a request may take.
        share_left: the share of requests before whose end the client hangs up.
    """

    host: str
    asker: Asker
    tally: Tally
    api_keys: tuple[str, ...] = ()
    limit_s: float = 180.0
    share_left: float = 0.1
    _connection: HTTPConnection | None = None

    def run(self, stop: threading.Event) -> None:
        """Send requests until `stop` is set."""
        while not stop.is_set():
            if self.ask_once() == "told":
                stop.wait(_RETRY_S)
        self._close()

    def ask_once(self) -> Outcome:
        """Send one request, and record its outcome."""
        kind, ask = self.asker.ask()
        began_s = time.monotonic()
        problem = ""
        try:
            outcome = self._exchange(ask)
        except TimeoutError:
            outcome = "hung"
        except (WrongAnswer, OSError, HTTPException, LookupError, TypeError, ValueError) as error:
            outcome = "wrong"
            problem = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - began_s
        if took_s > self.limit_s:
            outcome = "hung"
        if outcome in ("wrong", "hung"):
            problem = f"{problem} after {took_s:.1f} s: {_in_short(ask)}"
            self._close()
        self.tally.add(kind, outcome, took_s, problem)
        return outcome

    def _exchange(self, ask: Ask) -> Outcome:
        random = self.asker.random
        leaving = random.choice(_LEAVINGS) if random.random() < self.share_left else None
        connection = self._connect()
        self._send(connection, ask, leaving)
        if leaving == "waiting":
            select.select([connection.sock], [], [], random.uniform(0, _LONGEST_STAY_S))
        if leaving in ("sending", "waiting"):
            self._close(is_reset=random.random() < 0.5)
            return "left"
        response = connection.getresponse()
        if leaving == "reading" and response.status == 200 and ask.ending_of:
            for _ in islice(events_of(response), random.randint(0, 20)):
                pass
            self._close(is_reset=random.random() < 0.5)
            return "left"
        outcome = _outcome(response, ask)
        if response.will_close:
            self._close()
        return outcome

    def _connect(self) -> HTTPConnection:
        if self._connection is None:
            self._connection = HTTPConnection(self.host, timeout=self.limit_s)
            self._connection.connect()
        return self._connection

    def _send(self, connection: HTTPConnection, ask: Ask, leaving: Leaving | None) -> None:
        headers = {"Content-Type": "application/json"}
        if self.api_keys:
            headers["Authorization"] = f"Bearer {self.asker.random.choice(self.api_keys)}"
        headers |= ask.headers
        if ask.body is None:
            connection.request("GET", ask.path, headers=headers)
            return
        body = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
        headers["Content-Length"] = str(len(body))
        if leaving == "sending":
            body = body[: len(body) // 2]
        connection.request("POST", ask.path, body, headers)

    def _close(self, *, is_reset: bool = False) -> None:
        if self._connection is None:
            return
        if is_reset:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._connection.close()
        self._connection = None


def _in_short(ask: Ask) -> str:
    """A request for a message: its prompt comes last, because it may be long."""
    if not isinstance(ask.body, dict):
        return f"{ask.path} {str(ask.body)[:_MAX_SHOWN]}"
    fields = sorted(ask.body.items(), key=lambda item: len(str(item[1])))
    return f"{ask.path} {str(dict(fields))[:_MAX_SHOWN]}"


def _outcome(response: HTTPResponse, ask: Ask) -> Outcome:
    if response.status != 200:
        return _refusal(response, ask)
    require(not ask.is_bad, "a bad request was answered")
    if ask.ending_of is None:
        ask.check(json.loads(response.read()))
        return "answered"
    content_type = response.headers["Content-Type"]
    require(content_type.startswith("text/event-stream"), f"a stream is {content_type}")
    events, ending = read_to_the_end(events_of(response), ask.ending_of)
    if ending == "error":
        return "told"
    ask.check_events(events)
    return "answered"


def _refusal(response: HTTPResponse, ask: Ask) -> Outcome:
    text = response.read()
    status = response.status
    message = json.loads(text)["error"]["message"]
    require(bool(message), f"a {status} without a message: {text[:200]!r}")
    if status in (429, 503):
        require(bool(response.headers["Retry-After"]), f"a {status} without Retry-After")
        return "told" if status == 503 else "refused"
    require(ask.is_bad, f"a good request got a {status}: {text[:200]!r}")
    require(400 <= status < 500, f"a bad request got a {status}: {text[:200]!r}")
    return "refused"


@contextmanager
def running(clients: list[Client]) -> Iterator[None]:
    """Run clients in threads until the end of the block; each then ends its last request.

    Raises:
        TimeoutError: one did not, long after its limit.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=each.run, args=(stop,), daemon=True) for each in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
    deadline = time.monotonic() + 2 * max(client.limit_s for client in clients)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    num_alive = sum(thread.is_alive() for thread in threads)
    if num_alive:
        raise TimeoutError(f"{num_alive} of {len(threads)} clients still wait for an answer")
