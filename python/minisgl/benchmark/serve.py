"""Load on any OpenAI-compatible server, and what came of it.

    python -m minisgl.benchmark.serve trace --trace FILE ...     w5: recorded arrivals
    python -m minisgl.benchmark.serve closed ...                 w6: a number of requests at once
    python -m minisgl.benchmark.serve mixed ...                  w7: long prompts among streams
    python -m minisgl.benchmark.serve poisson --rate 2 4 8 ...   independent arrivals

Each run has prompts of its own, so that no prefix cache of an earlier run helps. Several --rate or
--concurrency are measured one after the other. The environment's OPENAI_API_KEY is sent if set.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec
from tqdm import tqdm

from minisgl.benchmark.flags import make_parser
from minisgl.benchmark.online.client import Endpoint
from minisgl.benchmark.online.load import ClientReport, run_load, shares
from minisgl.benchmark.online.plots import check_plot, draw_sweep, draw_time_line
from minisgl.benchmark.online.processes import CpuMeter, find_server
from minisgl.benchmark.online.prompts import PromptMaker
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.report import Figures, Objective, client_health, summarize
from minisgl.benchmark.online.tables import table
from minisgl.benchmark.online.workloads import Shape, Workload, closed_loop
from minisgl.benchmark.perf import Figure, append_figures, machine
from minisgl.errors import ConfigError, OutputFailed
from minisgl.utils.env import openai_api_key
from minisgl.utils.standard_streams import write_out

_MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run of a workload: the figures of each of its parts, and all records."""

    parts: dict[str, Figures]
    records: list[RequestRecord]


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs workloads, each time with new prompts."""

    endpoint: Endpoint
    prompts: PromptMaker
    objective: Objective
    num_processes: int
    server_pid: int | None
    shows_progress: bool
    runs: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def run(self, workload: Workload) -> Run:
        """
        Raises:
            RuntimeError: a client process has died, or every request has failed.
        """
        prompts = replace(self.prompts, run=next(self.runs))
        parts = shares(workload, self.endpoint, prompts, self.num_processes)
        meters: list[CpuMeter] = []
        with tqdm(
            total=len(workload.requests),
            desc=workload.name,
            unit="request",
            disable=None if self.shows_progress else True,  # None: where stderr is no terminal
        ) as bar:
            reports = run_load(
                parts, lambda: meters.append(CpuMeter(self._server_processes())), bar.update
            )
        run = self._summary(reports, meters[0])
        errors = [record.error for record in run.records if record.error is not None]
        if len(errors) == len(run.records):
            raise RuntimeError(f"{workload.name}: all {len(errors)} requests failed: {errors[0]}")
        return run

    def _server_processes(self) -> list[Any]:
        return find_server(self.endpoint, self.server_pid)

    def _summary(self, reports: list[ClientReport], meter: CpuMeter) -> Run:
        cpu_shares = {f"cpu {name}": share for name, share in meter.shares().items()}
        records = [record for report in reports for record in report.records]
        parts = summarize(records, self.objective)
        parts[""] |= client_health(reports) | cpu_shares
        return Run(parts, records)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(endpoint: Endpoint) -> str:
    """Ask a server which model it serves.

    Raises:
        ConfigError: it does not answer, or lists none.
    """
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    request = urllib.request.Request(f"{endpoint.url.rstrip('/')}/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=endpoint.timeout_s) as response:
            models = msgspec.json.decode(response.read(), type=_Models).data
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it is the answer, too
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"--url {endpoint.url} lists no models: {reason}") from error
    if not models:
        raise ConfigError(f"--url {endpoint.url} lists no models: its list is empty")
    return models[0].id


def make_bench(args: argparse.Namespace, seed: int) -> Bench:
    endpoint = Endpoint(
        args.url,
        args.model or "",
        openai_api_key(),
        args.extra_body,
        args.continuous_usage,
        args.timeout,
    )
    return Bench(
        endpoint if args.model else replace(endpoint, model=first_model(endpoint)),
        PromptMaker(seed, args.token_ids, args.text),
        Objective(args.slo_ttft_ms, args.slo_tpot_ms),
        args.processes,
        args.server_pid,
        shows_progress=not args.no_progress,
    )


def show(workload: Workload, run: Run) -> None:
    for part, figures in run.parts.items():
        print(f"\n{workload.name}{part and ': '}{part}")
        print("\n".join(table(figures)))
    errors = [record.error for record in run.records if record.error is not None]
    for error in errors[:_MAX_ERRORS_SHOWN]:
        print(f"  failed: {error}")


def figures_of(
    args: argparse.Namespace, model: str, workload: Workload, runs: list[Run], command: str
) -> Iterator[Figure]:
    """One figure for each metric of each part, with its values in all runs that have it."""
    make = _figure_maker(args, model, command)
    for part in runs[0].parts:
        all_figures = [run.parts.get(part, {}) for run in runs]
        for metric in all_figures[0]:
            values = [figures[metric] for figures in all_figures if metric in figures]
            yield make(f"{workload.name}{part and ': '}{part}", metric, values)


def _figure_maker(
    args: argparse.Namespace, model: str, command: str
) -> Callable[[str, str, list[float]], Figure]:
    name = args.machine or machine()
    return lambda workload, metric, values: Figure(
        engine=args.engine,
        workload=workload,
        model=model,
        device=args.device,
        metric=metric,
        values=values,
        tp=args.tp,
        command=command,
        machine=name,
    )


def draw(path: Path, all_runs: list[tuple[Workload, list[Run]]]) -> None:
    """Draw medians by level, or one workload's last run over time."""
    workload, runs = all_runs[0]
    if len(all_runs) == 1:
        draw_time_line(path, workload.name, runs[-1].records)
        return
    points = {
        each.level: _medians([run.parts[""] for run in runs])
        for each, runs in all_runs
        if each.level is not None
    }
    draw_sweep(path, workload.name.partition(",")[0], workload.level_name, points)


def _medians(all_figures: list[Figures]) -> Figures:
    return {
        name: statistics.median(figures[name] for figures in all_figures if name in figures)
        for name in all_figures[0]
    }


def main(argv: Sequence[str] | None = None) -> None:
    """
    Args:
        argv: the command line's if absent.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = make_parser(__doc__).parse_args(words)
        _measure(args, words)
        write_out("")  # all that was printed
    except (ConfigError, OutputFailed, OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _measure(args: argparse.Namespace, words: list[str]) -> None:
    workloads = args.make_workloads(args)
    if args.plot:
        check_plot(args.plot)
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4)) // 2
    bench = make_bench(args, seed)
    drawn = ["--seed", str(seed)] if args.seed is None else []
    command = shlex.join(["python", "-m", "minisgl.benchmark.serve", *words, *drawn])
    if args.warm_up:
        short = Shape((32, 32), (16, 16))
        bench.run(closed_loop("warm-up", short, args.warm_up, args.warm_up))
    all_runs = []
    for workload in workloads:
        runs = _repeat(bench, workload, args.repeat)
        all_runs.append((workload, runs))
        if args.out:  # now: a later workload may fail
            figures = figures_of(args, bench.endpoint.model, workload, runs, command)
            append_figures(args.out, list(figures))
    if args.plot:
        draw(args.plot, all_runs)


def _repeat(bench: Bench, workload: Workload, num_runs: int) -> list[Run]:
    runs = []
    for _ in range(num_runs):
        runs.append(bench.run(workload))
        show(workload, runs[-1])
    return runs


if __name__ == "__main__":
    main()
