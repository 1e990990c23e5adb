"""Attacks on a running server, one after the other, and the effect of each on its other clients.

    python benchmark/stress/attacks.py --url http://127.0.0.1:8000 --model NAME \\
        [--only NAME,...] [--json FILE] [--pid PID]

While an attack runs from a process of its own, one thread here asks for /health every 20 ms and
another reads the stream of a text completion. The table has what they saw:

    health      milliseconds from when a check was due to its answer: median, 99 %, the longest
    stall       milliseconds that the machine itself stood still, at most; and the 99 % of /health
                without the checks during which it did. Virtual machines do so now and then.
    gap         seconds between two chunks of the stream, at most
    after       what the server answers to a completion afterwards, and after how many seconds; how
                many requests it still computes
    MiB         resident memory of the server's processes before, at most, and after (--pid)

An attack that takes longer than --limit is ended. The attacker shares the machine's cores with the
server, at a lower priority.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import msgspec

from minisgl.benchmark.arguments import duration, output_file, positive
from minisgl.benchmark.stress.attacks import ATTACKS
from minisgl.benchmark.stress.target import Server, Target
from minisgl.benchmark.stress.watch import (
    HealthWatch,
    MachineWatch,
    MemoryWatch,
    NeighbourWatch,
    context_of,
    num_engine_requests,
    quantile_s,
)

NICENESS = 10
IDLE_WITHIN_S = 60.0
HEAD = (
    f"{'attack':34} {'s':>6} {'p50':>6} {'p99':>7} {'max ms':>8} {'checks':>6} "
    f"{'stall':>6} {'p99':>7} {'gap s':>6}  after"
)


@dataclass(frozen=True)
class Result:
    """The observations during one attack. Times are in the units of their names; memory in MiB.

    Undisturbed checks are those during which the machine itself did not stand still.
    """

    attack: str
    duration_s: float
    was_broken_off: bool
    statuses: dict[str, int]
    health_p50_ms: float
    health_p99_ms: float
    health_max_ms: float
    num_checks: int
    num_failed_checks: int
    machine_stall_max_ms: float
    num_undisturbed_checks: int
    undisturbed_health_p99_ms: float
    gap_s: float
    num_chunks: int
    num_broken_streams: int
    completion_after: str
    served_after_s: float
    num_requests_left: int
    memory_mib: tuple[int, int, int]

    def __str__(self) -> str:
        health = f"{self.health_p50_ms:6.1f} {self.health_p99_ms:7.1f} {self.health_max_ms:8.1f}"
        failed = f" {self.num_failed_checks} checks failed" if self.num_failed_checks else ""
        limit = " broken off" if self.was_broken_off else ""
        left = f" {self.num_requests_left} left" if self.num_requests_left else ""
        memory = " ".join(map(str, self.memory_mib)) if any(self.memory_mib) else ""
        seen = " ".join(f"{status}x{count}" for status, count in self.statuses.items())
        return (
            f"{self.attack:34} {self.duration_s:6.1f} {health} {self.num_checks:6} "
            f"{self.machine_stall_max_ms:6.0f} {self.undisturbed_health_p99_ms:7.1f} "
            f"{self.gap_s:6.2f}  {self.completion_after} {self.served_after_s:.1f} s"
            f"{left}{failed}{limit} | {memory} | {seen}"
        )


def attack_from_here(name: str, server: Server, duration_s: float, link: Connection) -> None:
    """Body of the attacker's process: None over the link when it begins, then what it gets."""
    os.nice(NICENESS)
    attack = ATTACKS[name]
    bodies = attack.make_bodies(server)
    link.send(None)
    attack.run(Target(server, link.send, duration_s), bodies)


class Attacker:
    """An attack in a process of its own."""

    def __init__(self, name: str, server: Server, duration_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, other_end = context.Pipe(duplex=False)
        arguments = (name, server, duration_s, other_end)
        self._process = context.Process(target=attack_from_here, args=arguments, daemon=True)
        self._process.start()
        other_end.close()
        assert self._link.recv() is None
        self._began = time.perf_counter()
        self.statuses: Counter[str] = Counter()
        self.duration_s = 0.0
        self.was_broken_off = False

    def wait(self, limit_s: float) -> None:
        """Count the answers until the attack ends, or end it at the limit."""
        deadline = self._began + limit_s
        try:
            while self._link.poll(max(0.0, deadline - time.perf_counter())):
                self.statuses[self._link.recv()] += 1
            self.was_broken_off = True
            self._process.kill()
        except EOFError:
            pass
        self._process.join()
        self.duration_s = time.perf_counter() - self._began


def completion(server: Server, timeout_s: float) -> str:
    """The status of an ordinary completion, or the name of an error."""
    try:
        body = server.body(prompt="the dog", max_tokens=8)
        status, _ = server.post("/v1/completions", body, timeout_s)
    except (OSError, HTTPException) as error:
        return type(error).__name__
    return str(status)


def requests_left(server: Server) -> int:
    """The requests that the engine still computes after a while; 0 as soon as there are none."""
    deadline = time.perf_counter() + IDLE_WITHIN_S
    while (left := num_engine_requests(server)) and time.perf_counter() < deadline:
        time.sleep(0.1)
    return left


def measure(name: str, server: Server, args: argparse.Namespace) -> Result:
    timeout_s = args.limit + IDLE_WITHIN_S
    health = HealthWatch(server, timeout_s)
    neighbour = NeighbourWatch(server, timeout_s)
    memory = MemoryWatch(args.pid)
    machine = MachineWatch()
    with memory:
        with neighbour:
            neighbour.wait_for_chunk()
            attacker = Attacker(name, server, args.seconds)
            with machine, health:
                attacker.wait(args.limit)
        ended = time.perf_counter()
        answer = completion(server, timeout_s)
        served_after_s = time.perf_counter() - ended
        left = requests_left(server)
    p50_ms, p99_ms, max_ms = (
        round(1000 * quantile_s(health.checks, share), 1) for share in (0.5, 0.99, 1.0)
    )
    undisturbed = health.undisturbed(machine.stalls)
    return Result(
        name,
        round(attacker.duration_s, 2),
        attacker.was_broken_off,
        dict(attacker.statuses),
        p50_ms,
        p99_ms,
        max_ms,
        len(health.checks),
        health.num_failed,
        round(1000 * machine.longest_s),
        len(undisturbed),
        round(1000 * quantile_s(undisturbed, 0.99), 1),
        round(neighbour.largest_gap_s, 3),
        neighbour.num_chunks,
        neighbour.num_broken,
        answer,
        round(served_after_s, 2),
        left,
        (memory.before >> 20, memory.peak >> 20, memory.now >> 20),
    )


def chosen(only: str | None) -> list[str]:
    """The attacks whose names begin with one of the given words; all if none are given."""
    if only is None:
        return list(ATTACKS)
    return [name for name in ATTACKS if name.startswith(tuple(only.split(",")))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the model's name in the API")
    parser.add_argument("--api-key", help="of the watching clients, and of most attacks")
    parser.add_argument("--max-open", type=positive, default=2048, help="the server's own option")
    parser.add_argument("--only", help="beginnings of names, with commas")
    parser.add_argument("--list", action="store_true", help="write the names and end")
    parser.add_argument("--seconds", type=duration, default=5, help="of attacks without an end")
    parser.add_argument("--limit", type=duration, default=120, help="seconds of one attack at most")
    parser.add_argument("--pid", type=positive, help="the server's process, to measure its memory")
    parser.add_argument("--json", type=output_file, help="append results to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    names = chosen(args.only)
    if args.list:
        print("\n".join(names))
        return
    url = urlsplit(args.url)
    assert url.hostname is not None
    connect = partial(Server, url.hostname, url.port or 80, args.model, args.api_key)
    server = connect(context_of(connect()), args.max_open)
    print(HEAD)
    for name in names:
        result = measure(name, server, args)
        print(result, flush=True)
        if args.json:
            with args.json.open("ab") as file:
                file.write(msgspec.json.encode(asdict(result)) + b"\n")


if __name__ == "__main__":
    main()
