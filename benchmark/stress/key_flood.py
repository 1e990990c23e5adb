"""Two API keys: one sends far more requests than its limits allow; the effect on the other.

    python benchmark/stress/key_flood.py [--phases 5] [--seconds 20] [--per-s 50] [--json FILE] \\
        [-- OPTIONS OF THE SERVER]

It starts a server with --key-limits. The second key, which has no limits, sends one short stream
after the other. Phases in which it is alone, and phases in which a process of its own floods the
server with the first key's requests, take turns. The table has the second key's milliseconds until
the first event and until the end: median and 99 %. The run fails if an answer to the first key is
neither a 200 nor a 429 with Retry-After, or if an answer to the second key is not a 200.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minisgl.benchmark.arguments import duration, factor, output_file, positive
from minisgl.benchmark.perf import provenance
from minisgl.benchmark.stress.events import events_of, openai_ending, read_to_the_end
from minisgl.benchmark.stress.processes import StartedServer, exit_on_sigterm

LIMITED = "sk-limited"
FREE = "sk-free"
MODEL = "model"
LIMITS = f"""\
[limited]
sha256 = "{hashlib.sha256(LIMITED.encode()).hexdigest()}"
requests_per_minute = 6
open_requests = 2
"""
TIMEOUT_S = 60.0
NICENESS = 10
NUM_FLOODERS = 8
WARM_UP_REQUESTS = 20


@dataclass(slots=True)
class Latencies:
    """Latencies of the second key's streams, in milliseconds."""

    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        rounded = {"requests": float(len(self.whole_ms))}
        for name, values in (("first", self.first_ms), ("whole", self.whole_ms)):
            quantiles = statistics.quantiles(values, n=100)
            rounded[f"{name}_p50_ms"] = round(quantiles[49], 1)
            rounded[f"{name}_p99_ms"] = round(quantiles[98], 1)
        return rounded


def post(connection: HTTPConnection, key: str, **fields: Any) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = json.dumps({"model": MODEL, **fields})
    connection.request("POST", "/v1/completions", body, headers)


def measure_one(host: str, latencies: Latencies) -> None:
    """Read one stream with the second key."""
    began_s = time.perf_counter()
    with closing(HTTPConnection(host, timeout=TIMEOUT_S)) as connection:
        post(connection, FREE, prompt="the dog", max_tokens=16, ignore_eos=True, stream=True)
        response = connection.getresponse()
        if response.status != 200:
            raise ConnectionError(f"the second key got a {response.status}: {response.read()!r}")
        events = events_of(response)
        first = next(events)
        first_s = time.perf_counter()
        _, ending = read_to_the_end([first, *events], openai_ending)
    if ending != "end":
        raise ConnectionError("a stream of the second key ended with an error")
    latencies.first_ms.append(1000 * (first_s - began_s))
    latencies.whole_ms.append(1000 * (time.perf_counter() - began_s))


def flood(host: str, per_s: float, link: Connection) -> None:
    """Body of the flooding process: sends None over the link as it begins, its results at the end.

    It ends when something comes over the link.
    """
    os.nice(NICENESS)
    seen: Counter[str] = Counter()
    stop = threading.Event()
    threads = [
        threading.Thread(target=flood_in_thread, args=(host, per_s / NUM_FLOODERS, seen, stop))
        for _ in range(NUM_FLOODERS)
    ]
    link.send(None)
    for thread in threads:
        thread.start()
    link.recv()
    stop.set()
    for thread in threads:
        thread.join()
    link.send(seen)


def flood_in_thread(host: str, per_s: float, seen: Counter[str], stop: threading.Event) -> None:
    due_s = time.monotonic()
    while not stop.wait(max(0.0, due_s - time.monotonic())):
        due_s += 1 / per_s
        with closing(HTTPConnection(host, timeout=TIMEOUT_S)) as connection:
            post(connection, LIMITED, prompt="the fox", max_tokens=1)
            response = connection.getresponse()
            response.read()
            wait = " with Retry-After" if response.headers["Retry-After"] else ""
            seen[f"{response.status}{wait}"] += 1


def phase(host: str, seconds: float, latencies: Latencies) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        measure_one(host, latencies)


def flooded_phase(host: str, args: argparse.Namespace, latencies: Latencies) -> Counter[str]:
    context = multiprocessing.get_context("spawn")
    link, other_end = context.Pipe()
    process = context.Process(target=flood, args=(host, args.per_s, other_end), daemon=True)
    process.start()
    assert link.recv() is None
    phase(host, args.seconds, latencies)
    link.send(None)
    seen: Counter[str] = link.recv()
    process.join()
    return seen


def run(host: str, args: argparse.Namespace) -> dict[str, Any]:
    for _ in range(WARM_UP_REQUESTS):
        measure_one(host, Latencies())
    alone = Latencies()
    flooded = Latencies()
    seen: Counter[str] = Counter()
    for _ in range(args.phases):
        phase(host, args.seconds, alone)
        seen += flooded_phase(host, args, flooded)
    return {
        "alone": alone.summary(),
        "flooded": flooded.summary(),
        "flood_statuses": dict(seen),
        "flood_per_s": round(seen.total() / (args.phases * args.seconds), 1),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", type=positive, default=5, help="of each kind, in turns")
    parser.add_argument("--seconds", type=duration, default=20.0, help="of one phase")
    parser.add_argument("--per-s", type=factor, default=50.0, help="requests of the first key")
    parser.add_argument(
        "--json", type=output_file, help="where a line with the results is appended"
    )
    parser.add_argument("server", nargs="*", help="after --: options of the server")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    made = {**provenance(), "server": " ".join(args.server)}
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder) / "limits.toml"
        limits.write_text(LIMITS)
        own = ["--port", "0", "--served-model-name", MODEL, "--key-limits", str(limits)]
        keys = {"MINISGL_API_KEY": f"{LIMITED},{FREE}"}
        with StartedServer([*args.server, *own], keys) as server:
            result = run(server.wait_ready().host, args)
    print(f"{'':10}" + "".join(f"{name:>14}" for name in result["alone"]))
    for name in ("alone", "flooded"):
        print(f"{name:10}" + "".join(f"{number:14g}" for number in result[name].values()))
    print(f"the first key, {result['flood_per_s']} a second: {result['flood_statuses']}")
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps({**made, **result}) + "\n")
    sys.exit(0 if result["flood_statuses"].keys() <= {"200", "429 with Retry-After"} else 1)


if __name__ == "__main__":
    main()
