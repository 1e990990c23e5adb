"""Faults of a running server's processes, one after the other, and what its clients get.

    python benchmark/stress/faults.py --url http://127.0.0.1:8000 --model NAME --pid PID \\
        [--rounds 10] [--streams 32] [--every-s 31] [--json FILE]

In each round each worker is killed (SIGKILL) once and stopped (SIGSTOP) once, while clients read
streams, one after the other each. A line has what they got in the round's fault:

    ended       streams that ended with [DONE]
    told        streams that ended with an error object, or a 503 with Retry-After
    broken      streams that ended without either, or did not end
    back s      from the fault until /health was 200 again
    last s      from the fault until the last stream that it cut was told so

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
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from minisgl.benchmark.stress.processes import (
    CHECK_EVERY_S,
    TIMEOUT_S,
    wait_for_health,
    workers_of,
)

_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """What clients got of one fault."""

    round: int
    worker: str
    fault: str
    ended: int
    told: int
    broken: int
    back_s: float
    last_s: float


@dataclass(slots=True)
class Clients:
    """Threads that read one stream after the other.

    Attributes:
        outcomes: how streams ended, since the latest fault.
        told_at: when one was last told of an error, by `time.monotonic`.
    """

    host: str
    model: str
    outcomes: Counter[str] = field(default_factory=Counter)
    told_at: float = 0.0
    is_over: bool = False

    def read_streams(self) -> None:
        while not self.is_over:
            outcome = self._read_stream()
            self.outcomes[outcome] += 1
            if outcome == "told":
                self.told_at = time.monotonic()
                time.sleep(CHECK_EVERY_S)

    def _read_stream(self) -> str:
        body = {"model": self.model, "prompt": "the", "stream": True, "max_tokens": _TOKENS}
        body |= {"ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        try:
            with closing(HTTPConnection(self.host, timeout=TIMEOUT_S)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                return self._outcome(connection.getresponse())
        except (OSError, HTTPException):
            return "broken"

    def _outcome(self, response: HTTPResponse) -> str:
        if response.status == 503 and "error" in json.loads(response.read()):
            return "told" if response.headers["Retry-After"] else "broken"
        last = ""
        for line in response:
            last = line.decode().strip() or last
            if self.is_over:
                return "left"
        if last == "data: [DONE]":
            return "ended"
        return "told" if last.startswith('data: {"error"') else "broken"


def inflict(
    number: int, worker: str, fault: str, server: psutil.Process, clients: Clients
) -> Result:
    process = workers_of(server)[worker]
    clients.outcomes.clear()
    began_at = time.monotonic()
    if fault == "kill":
        process.kill()
    else:
        process.suspend()
    wait_for_health(clients.host, expected=False)
    wait_for_health(clients.host, expected=True)
    back_s = round(time.monotonic() - began_at, 2)
    outcomes = clients.outcomes
    return Result(
        number,
        worker,
        fault,
        outcomes["ended"],
        outcomes["told"],
        outcomes["broken"],
        back_s,
        round(clients.told_at - began_at, 2),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--pid", type=int, required=True, help="of the server's parent process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--every-s", type=float, default=31.0)
    parser.add_argument("--json", type=Path, help="where a line for each fault is appended")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    server = psutil.Process(args.pid)
    clients = Clients(urlsplit(args.url).netloc, args.model)
    for _ in range(args.streams):
        threading.Thread(target=clients.read_streams, daemon=True).start()
    print(f"{'round':>5} {'worker':14} {'fault':5} ended told broken  back s  last s")
    for number in range(args.rounds):
        for worker in workers_of(server):
            for fault in ("kill", "stop"):
                time.sleep(args.every_s)
                result = inflict(number, worker, fault, server, clients)
                print("{:5} {:14} {:5} {:5} {:4} {:6} {:7} {:7}".format(*asdict(result).values()))
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    clients.is_over = True
    num_left = len(server.children(recursive=True))
    print(f"{num_left} processes at the end")


if __name__ == "__main__":
    main()
