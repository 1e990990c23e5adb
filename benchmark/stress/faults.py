"""Faults of a running server's processes, one after the other, and their effect on its clients.

    python benchmark/stress/faults.py --url http://127.0.0.1:8000 --model NAME --pid PID \\
        [--rounds 10] [--worker NAME] [--streams 32] [--every-s 31] [--json FILE]

In each round each worker is killed (SIGKILL) once and stopped (SIGSTOP) once, while each client
reads one stream after the other. A line of the table is about one fault:

    ended       streams that ended with [DONE]
    told        streams that ended with an error object, or a 503 with Retry-After
    broken      streams that ended without either, or did not end
    back s      from the fault until the worker was replaced and a new request was answered
    last s      from the fault until the last stream that it cut got its error; 0 if it cut none
    engine      whether scheduler 0 is the same process as before: kept or new

Two faults are `--every-s` seconds of service apart: the server ends after three within a minute.
For a stopped worker the server needs its --step-timeout-s; a small one makes this run shorter.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from http.client import HTTPException, HTTPResponse
from urllib.parse import urlsplit

import psutil

from minisgl.benchmark.arguments import duration, output_file, positive
from minisgl.benchmark.stress.processes import (
    CHECK_EVERY_S,
    TIMEOUT_S,
    wait_for_recovery,
    workers_of,
)
from minisgl.benchmark.stress.target import Server

_TOKENS = 2000
_MAX_WAIT_S = 2.0  # of clients after a `Retry-After`
_ENGINE = "scheduler-0"


@dataclass(frozen=True, slots=True)
class Result:
    """The effect of one fault on the clients."""

    round: int
    worker: str
    fault: str
    ended: int
    told: int
    broken: int
    back_s: float
    last_s: float
    engine: str


@dataclass(slots=True)
class Clients:
    """Threads that read one stream after the other, and retry when a refusal says so.

    Attributes:
        outcomes: how streams ended, since the latest fault.
        told_at: when a stream last got an error, by `time.monotonic`.
    """

    server: Server
    outcomes: Counter[str] = field(default_factory=Counter)
    told_at: float = 0.0
    is_over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> int:
        """The status of the answer to a short request; 0 if none comes."""
        try:
            status, _ = self.server.post(
                "/v1/completions", self.server.body(prompt="the", max_tokens=1), TIMEOUT_S
            )
        except (OSError, HTTPException):
            return 0
        return status

    def read_streams(self) -> None:
        while not self.is_over.is_set():
            outcome, wait_s = self._read_stream()
            self.outcomes[outcome] += 1
            if outcome == "told":
                self.told_at = time.monotonic()
                self.is_over.wait(wait_s)

    def _read_stream(self) -> tuple[str, float]:
        """Return how a stream ended, and after how many seconds the client retries."""
        fields = {"prompt": "the", "stream": True, "max_tokens": _TOKENS, "ignore_eos": True}
        body = self.server.body(**fields)
        try:
            with closing(self.server.connect(TIMEOUT_S)) as connection:
                connection.request("POST", "/v1/completions", body, self.server.headers())
                response = connection.getresponse()
                return self._outcome(response), _wait_s(response)
        except (OSError, HTTPException):
            return "broken", CHECK_EVERY_S

    def _outcome(self, response: HTTPResponse) -> str:
        if response.status == 503 and "error" in json.loads(response.read()):
            return "told" if response.headers["Retry-After"] else "broken"
        last = ""
        for line in response:
            last = line.decode().strip() or last
            if self.is_over.is_set():
                return "left"
        if last == "data: [DONE]":
            return "ended"
        return "told" if last.startswith('data: {"error"') else "broken"


def _wait_s(response: HTTPResponse) -> float:
    """The seconds of `Retry-After`, within bounds; a stream that was cut has no such header."""
    retry_after_s = float(response.headers["Retry-After"] or 0.0)
    return min(max(retry_after_s, CHECK_EVERY_S), _MAX_WAIT_S)


def inflict(
    number: int, worker: str, fault: str, server: psutil.Process, clients: Clients
) -> Result:
    before = workers_of(server)
    process = before[worker]
    clients.outcomes.clear()
    clients.told_at = 0.0
    began_at = time.monotonic()
    if fault == "kill":
        process.kill()
    else:
        process.suspend()
    wait_for_recovery(server, worker, process, clients.ask)
    back_s = round(time.monotonic() - began_at, 2)
    outcomes = clients.outcomes
    is_kept = workers_of(server)[_ENGINE] == before[_ENGINE]
    return Result(
        number,
        worker,
        fault,
        outcomes["ended"],
        outcomes["told"],
        outcomes["broken"],
        back_s,
        round(max(0.0, clients.told_at - began_at), 2),
        "kept" if is_kept else "new",
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--pid", type=positive, required=True, help="of the server's parent process"
    )
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--worker", action="append", help="its name; of all without; repeated")
    parser.add_argument("--streams", type=positive, default=32)
    parser.add_argument("--every-s", type=duration, default=31.0)
    parser.add_argument("--json", type=output_file, help="where a line for each fault is appended")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    server = psutil.Process(args.pid)
    url = urlsplit(args.url)
    assert url.hostname
    assert url.port
    clients = Clients(Server(url.hostname, url.port, args.model))
    for _ in range(args.streams):
        threading.Thread(target=clients.read_streams, daemon=True).start()
    print(f"{'round':>5} {'worker':14} {'fault':5} ended told broken  back s  last s engine")
    for number in range(args.rounds):
        for worker in args.worker or workers_of(server):
            for fault in ("kill", "stop"):
                time.sleep(args.every_s)
                result = inflict(number, worker, fault, server, clients)
                print(
                    "{:5} {:14} {:5} {:5} {:4} {:6} {:7} {:7} {}".format(*asdict(result).values())
                )
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    clients.is_over.set()
    num_left = len(server.children(recursive=True))
    print(f"{num_left} processes at the end")


if __name__ == "__main__":
    main()
