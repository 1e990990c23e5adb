"""Minutes of random load on a running server, and whether the server stays stable.

    python benchmark/stress/soak.py --minutes 30 [--kill-every 5] [--json FILE] \\
        [-- OPTIONS OF THE SERVER]
    python benchmark/stress/soak.py --minutes 30 --url http://127.0.0.1:8000 --pid PID

Without --pid it starts a server with a small KV cache and three API keys, and ends it with SIGTERM.
Clients send all kinds of requests of `minisgl.benchmark.stress.mix`, bad ones included, and hang up
in a part of them. --kill-every kills a random worker at this interval. The run fails if

* a request hangs, or its answer is neither correct nor a clear error;
* a good request gets a 503 or an error event though no worker was killed;
* requests or KV pages are left when there are no more clients;
* processes, files in the temporary folder or files in /dev/shm are left when the server has ended,
  or its exit code is not 0;
* memory, descriptors or threads of a process grow by more than the bound per hour.

Growth is measured without the time from a kill until --warm-up seconds after the server is ready.
It is `flat` if the 95 % interval of its slope is below the bound, and `unclear` if the bound is in
the interval: then the run was too short to tell.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from minisgl.benchmark.arguments import delay, duration, natural, output_file, positive, share
from minisgl.benchmark.perf import provenance
from minisgl.benchmark.stress.clients import Client, Tally, running
from minisgl.benchmark.stress.mix import Asker
from minisgl.benchmark.stress.processes import (
    StartedServer,
    exit_on_sigterm,
    wait_for_recovery,
    wait_until,
    what_is_left,
    workers_of,
)
from minisgl.benchmark.stress.samples import MEASURES, ProcessWatch
from minisgl.benchmark.stress.target import Server
from minisgl.benchmark.stress.trends import Trend, trend_of
from minisgl.benchmark.stress.watch import Span, context_of

API_KEYS = ("sk-soak-1", "sk-soak-2", "sk-soak-3")
SERVER_OPTIONS = ["--port", "0", "--num-pages", "320", "--max-open-requests", "64"]
SHARED_MEMORY = Path("/dev/shm")
END_WITHIN_S = 60.0
GAUGES = ("requests_running", "requests_waiting", "kv_pages_used_ratio")


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed.

    Attributes:
        at_s: since the beginning of the load.
        back_s: until it was replaced and a new request was answered.
    """

    worker: str
    at_s: float
    back_s: float


@dataclass(slots=True)
class Report:
    """The results, as they are written to a file."""

    server: str
    model: str
    minutes: float
    num_clients: int
    seed: int
    warm_up_s: float
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0
    num_retractions: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    bounds_per_hour: dict[str, float] = field(default_factory=dict)
    trends: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)
    idle_before: dict[str, dict[str, float]] = field(default_factory=dict)
    idle_after: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)


@dataclass(slots=True)
class Soak:
    """The server under load, and the results so far."""

    args: argparse.Namespace
    host: str
    process: psutil.Process
    keys: tuple[str, ...]
    report: Report
    restarts: list[Span] = field(default_factory=list)

    def run(self, watch: ProcessWatch) -> None:
        tally = Tally()
        self.report.idle_before = watch.look()
        began_s = time.perf_counter()
        with watch:
            try:
                with running(self._clients(tally)):
                    self._wait_and_kill(watch, began_s)
            except TimeoutError as error:
                self.report.failures.append(str(error))
        self._note_outcomes(tally)
        self._note_idle(watch)
        self._note_trends(watch, Span(began_s, began_s + self.args.warm_up))

    def _clients(self, tally: Tally) -> list[Client]:
        server = self.connect()
        context = context_of(server)
        return [
            Client(
                self.host,
                Asker(
                    random.Random(self.args.seed * 1000 + number),
                    server.model,
                    context,
                    self.args.max_tokens,
                    has_keys=bool(self.keys),
                ),
                tally,
                self.keys,
                self.args.limit,
                self.args.hang_up,
            )
            for number in range(self.args.clients)
        ]

    def connect(self) -> Server:
        host, port = self.host.split(":")
        key = self.keys[0] if self.keys else None
        return Server(host, int(port), self.report.model, key)

    def _wait_and_kill(self, watch: ProcessWatch, began_s: float) -> None:
        end_s = began_s + 60 * self.args.minutes
        kill_every_s = 60 * self.args.kill_every if self.args.kill_every else float("inf")
        next_kill_s = began_s + kill_every_s
        chance = random.Random(self.args.seed)
        while (now := time.perf_counter()) < end_s:
            if now < next_kill_s:
                time.sleep(min(1.0, end_s - now))
                continue
            self._kill(chance, watch, began_s)
            next_kill_s += kill_every_s

    def _kill(self, chance: random.Random, watch: ProcessWatch, began_s: float) -> None:
        workers = workers_of(self.process)
        worker = chance.choice(sorted(workers))
        watch.look()
        before = set(self.process.children(recursive=True))
        killed_s = time.perf_counter()
        workers[worker].kill()
        wait_for_recovery(self.process, worker, workers[worker], self._ask)
        ready_s = time.perf_counter()
        self.restarts.append(Span(killed_s, ready_s + self.args.warm_up))
        kill = Kill(worker, round(killed_s - began_s, 1), round(ready_s - killed_s, 2))
        self.report.kills.append(kill)
        print(f"{kill.at_s:7.0f} s: {worker} was killed; ready again after {kill.back_s} s")
        orphans = before - set(self.process.children(recursive=True))
        left = what_is_left(orphans, END_WITHIN_S)
        self.report.require(not left, f"processes of the killed workers are left: {left}")

    def _ask(self) -> int:
        """The status of the answer to a short request; 0 if none comes."""
        server = self.connect()
        try:
            body = server.body(prompt="the", max_tokens=1)
            status, _ = server.post("/v1/completions", body, END_WITHIN_S)
        except (OSError, HTTPException):
            return 0
        return status

    def _note_outcomes(self, tally: Tally) -> None:
        by_kind: dict[str, dict[str, int]] = defaultdict(dict)
        totals: dict[str, int] = defaultdict(int)
        for (kind, outcome), count in sorted(tally.outcomes.items()):
            by_kind[kind][outcome] = count
            totals[outcome] += count
        self.report.outcomes = dict(by_kind)
        self.report.totals = dict(totals)
        self.report.longest_s = round(tally.longest_s, 1)
        self.report.require(tally.num_failed == 0, f"{tally.num_failed} requests failed")
        self.report.failures += tally.problems
        spans = self.restarts
        num_strays = sum(not any(s.begin <= at_s <= s.end for s in spans) for at_s in tally.told_s)
        self.report.require(num_strays == 0, f"{num_strays} 503s or error events without a restart")

    def _note_idle(self, watch: ProcessWatch) -> None:
        try:
            wait_until(lambda: not any(self._gauges()), "the server is idle", END_WITHIN_S)
        except TimeoutError:
            left = dict(zip(GAUGES, self._gauges(), strict=True))
            self.report.failures.append(f"{END_WITHIN_S:g} s after the last client: {left}")
        self.report.idle_after = watch.look()
        self.report.num_retractions = self._metric("retractions_total")

    def _gauges(self) -> list[float]:
        return [self._metric(name) for name in GAUGES]

    def _metric(self, name: str) -> float:
        connection = self.connect().connect(END_WITHIN_S)
        connection.request("GET", "/metrics", headers=self.connect().headers())
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        [line] = [line for line in lines if line.startswith(f"minisgl_{name} ")]
        return float(line.split()[1])

    def _note_trends(self, watch: ProcessWatch, warm_up: Span) -> None:
        bounds = self.report.bounds_per_hour
        samples = watch.samples_without([warm_up, *self.restarts])
        for (name, measure), of_measure in sorted(samples.items()):
            trend = trend_of(of_measure)
            if trend is None:
                continue
            verdict = trend.verdict(bounds[measure])
            noted = {**_rounded(trend), "verdict": verdict}
            self.report.trends.setdefault(name, {})[measure] = noted
            self.report.require(verdict != "grows", f"{measure} of {name} grows: {noted}")


def _rounded(trend: Trend) -> dict[str, object]:
    return {name: round(value, 2) for name, value in asdict(trend).items()}


def model_of(host: str, key: str | None) -> str:
    connection = HTTPConnection(host, timeout=END_WITHIN_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection.request("GET", "/v1/models", headers=headers)
    models = json.loads(connection.getresponse().read())
    connection.close()
    return str(models["data"][0]["id"])


@contextmanager
def server_under_test(args: argparse.Namespace) -> Iterator[tuple[Soak, StartedServer | None]]:
    """The running server that the options name, or one that is started here."""
    if args.pid is not None:
        keys = tuple(args.api_key or ())
        host = urlsplit(args.url).netloc
        yield make_soak(args, host, psutil.Process(args.pid), keys, "as it was"), None
        return
    options = [*SERVER_OPTIONS, *args.server]
    with StartedServer(options, {"MINISGL_API_KEY": ",".join(API_KEYS)}) as started:
        started.wait_ready()
        process = psutil.Process(started.process.pid)
        yield make_soak(args, started.host, process, API_KEYS, " ".join(options)), started


def make_soak(
    args: argparse.Namespace,
    host: str,
    process: psutil.Process,
    keys: tuple[str, ...],
    server: str,
) -> Soak:
    model = model_of(host, keys[0] if keys else None)
    report = Report(server, model, args.minutes, args.clients, args.seed, args.warm_up)
    bounds = (args.mib_per_hour, args.descriptors_per_hour, args.threads_per_hour)
    report.bounds_per_hour = dict(zip(MEASURES, bounds, strict=True))
    return Soak(args, host, process, keys, report)


def end(started: StartedServer, watch: ProcessWatch, report: Report, shared: set[str]) -> None:
    """Send SIGTERM, and look for processes and files that are left."""
    watch.look()
    started.process.terminate()
    exit_code = started.process.wait(END_WITHIN_S)
    report.require(exit_code == 0, f"the exit code is {exit_code}, not 0")
    left = what_is_left(watch.seen, END_WITHIN_S)
    report.require(not left, f"processes are left: {left}")
    files = [path.name for path in started.temporary.iterdir()]
    report.require(not files, f"files are left in the temporary folder: {files}")
    in_memory = sorted(names_in_shared_memory() - shared)
    report.require(not in_memory, f"files are left in {SHARED_MEMORY}: {in_memory}")


def names_in_shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def show(report: Report) -> None:
    print(f"\n{'kind':20}" + "".join(f"{outcome:>10}" for outcome in report.totals))
    for kind, outcomes in {**report.outcomes, "all": report.totals}.items():
        counts = [outcomes.get(outcome, 0) for outcome in report.totals]
        print(f"{kind:20}" + "".join(f"{count:10}" for count in counts))
    print(f"\n{'process':16}{'measure':14}{'per hour':>10}{'low':>10}{'high':>10}{'points':>8}")
    for name, trends in report.trends.items():
        for measure, trend in trends.items():
            row = [trend[each] for each in ("per_hour", "low", "high")]
            numbers = "".join(f"{number:10}" for number in row)
            levels = f"{trend['first']} to {trend['last']}"
            points = f"{trend['num_points']:8}"
            print(f"{name:16}{measure:14}{numbers}{points}  {trend['verdict']:8}{levels}")
    print(f"\n{report.num_retractions:g} retractions; the longest request: {report.longest_s} s")
    for failure in report.failures:
        print(f"FAILED: {failure}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=duration, default=10.0)
    parser.add_argument("--kill-every", type=duration, help="minutes; no worker is killed without")
    parser.add_argument("--clients", type=positive, default=16)
    parser.add_argument("--max-tokens", type=positive, default=32, help="of most answers")
    parser.add_argument("--limit", type=duration, default=180.0, help="seconds of one request")
    parser.add_argument(
        "--hang-up", type=share, default=0.1, help="part of the requests that clients give up"
    )
    parser.add_argument("--warm-up", type=delay, default=60.0, help="seconds without a trend")
    parser.add_argument("--mib-per-hour", type=float, default=16.0)
    parser.add_argument("--descriptors-per-hour", type=float, default=10.0)
    parser.add_argument("--threads-per-hour", type=float, default=5.0)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="with --pid")
    parser.add_argument("--pid", type=positive, help="of the first process of a running server")
    parser.add_argument("--api-key", action="append", help="of the running server; repeated")
    parser.add_argument(
        "--json", type=output_file, help="where a line with the results is appended"
    )
    parser.add_argument("server", nargs="*", help="after --: options of the server to start")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    exit_on_sigterm()
    made = provenance()
    shared = names_in_shared_memory()
    with server_under_test(args) as (soak, started):
        watch = ProcessWatch(soak.process)
        soak.run(watch)
        if started is not None:
            end(started, watch, soak.report, shared)
    show(soak.report)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps({**made, **asdict(soak.report)}) + "\n")
    sys.exit(1 if soak.report.failures else 0)


if __name__ == "__main__":
    main()
