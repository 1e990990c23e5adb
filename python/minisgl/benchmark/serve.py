"""Load on any OpenAI-compatible server, and what came of it.

    python -m minisgl.benchmark.serve trace --trace FILE ...     w5: recorded arrivals
    python -m minisgl.benchmark.serve closed ...                 w6: so many requests at once
    python -m minisgl.benchmark.serve mixed ...                  w7: long prompts among streams
    python -m minisgl.benchmark.serve poisson --rate 2 4 8 ...   independent arrivals

Each run has prompts of its own, so that no prefix cache of an earlier run helps. Several --rate or
--concurrency are measured one after the other. The environment's OPENAI_API_KEY is sent if set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.benchmark.online.client import Target
from minisgl.benchmark.online.load import ClientReport, run_load, shares
from minisgl.benchmark.online.plots import draw_sweep, draw_time_line
from minisgl.benchmark.online.processes import CpuMeter, find_server
from minisgl.benchmark.online.prompts import PromptMaker
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.report import Figures, Objective, client_health, summarize
from minisgl.benchmark.online.tables import table
from minisgl.benchmark.online.traces import read_trace
from minisgl.benchmark.online.workloads import (
    MixedShape,
    Replay,
    Shape,
    Workload,
    closed_loop,
    mixed,
    poisson,
    replay,
)
from minisgl.benchmark.perf import Figure, append_figures, machine
from minisgl.errors import ConfigError

_MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a workload gave: the figures of each of its parts, and all records."""

    parts: dict[str, Figures]
    records: list[RequestRecord]


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs workloads, each time with new prompts."""

    target: Target
    prompts: PromptMaker
    objective: Objective
    num_processes: int
    server_pid: int | None
    shows_progress: bool
    seeds: Iterator[int] = field(repr=False)

    def run(self, workload: Workload) -> Run:
        """
        Raises:
            RuntimeError: a client process has died.
        """
        prompts = replace(self.prompts, seed=next(self.seeds))
        parts = shares(workload, self.target, prompts, self.num_processes)
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
        return self._summary(reports, meters[0])

    def _server_processes(self) -> list[Any]:
        return find_server(self.target, self.server_pid)

    def _summary(self, reports: list[ClientReport], meter: CpuMeter) -> Run:
        cpu_shares = {f"cpu {name}": share for name, share in meter.shares().items()}
        records = [record for report in reports for record in report.records]
        parts = summarize(records, self.objective)
        parts[""] |= client_health(reports) | cpu_shares
        return Run(parts, records)


# ---- the command line


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def lengths(text: str) -> tuple[int, int]:
    """Parse a number of tokens, or LEAST-MOST."""
    least, _, most = text.partition("-")
    bounds = (positive(least), positive(most or least))
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text}: the first bound is above the second")
    return bounds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.benchmark.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, alias, add_flags in (
        ("trace", "w5", _add_trace_flags),
        ("closed", "w6", _add_closed_flags),
        ("mixed", "w7", _add_mixed_flags),
        ("poisson", None, _add_poisson_flags),
    ):
        command = commands.add_parser(
            name,
            aliases=[alias] if alias else [],
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add_flags(command)
        _add_server_flags(command)
        _add_prompt_flags(command)
        _add_report_flags(command)
    return parser


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's .jsonl, Azure's .csv")
    parser.add_argument("--speed", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument("--requests", type=positive, default=1000, help="the trace's first ones")
    parser.add_argument("--duration", type=float, default=float("inf"), help="seconds of arrivals")
    parser.add_argument(
        "--max-input", type=positive, default=40_960, help="longer prompts are left out"
    )
    parser.set_defaults(make_workloads=_trace_workloads)


def _add_closed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[256])
    _add_shape_flags(parser)
    parser.set_defaults(make_workloads=_closed_workloads)


def _add_poisson_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, nargs="+", required=True, help="requests a second")
    _add_shape_flags(parser)
    parser.set_defaults(make_workloads=_poisson_workloads)


def _add_shape_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=1024)
    parser.add_argument("--input", type=lengths, default="128", help="tokens, or LEAST-MOST")
    parser.add_argument("--output", type=lengths, default="256", help="tokens, or LEAST-MOST")
    parser.add_argument("--shared", type=int, default=0, help="further tokens, which prompts share")
    parser.add_argument("--prefix-sets", type=positive, default=1, help="sets that share them")


def _add_mixed_flags(parser: argparse.ArgumentParser) -> None:
    shape = MixedShape()
    parser.add_argument("--streams", type=positive, default=shape.num_streams)
    parser.add_argument("--stream-input", type=positive, default=shape.stream_input)
    parser.add_argument("--stream-output", type=positive, default=shape.stream_output)
    parser.add_argument("--long", type=positive, default=shape.num_long, help="long prompts")
    parser.add_argument("--long-input", type=positive, default=shape.long_input)
    parser.add_argument("--long-output", type=positive, default=shape.long_output)
    parser.add_argument("--long-start", type=float, default=shape.long_start_s, help="seconds")
    parser.add_argument("--long-every", type=float, default=shape.long_every_s, help="seconds")
    parser.set_defaults(make_workloads=_mixed_workloads)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument("--url", default="http://127.0.0.1:1919/v1", help="up to and with /v1")
    group.add_argument("--model", help="the first one that the server lists if absent")
    group.add_argument(
        "--server-pid", type=int, help="whose processes to measure; else the local port's listener"
    )
    group.add_argument(
        "--continuous-usage", action="store_true", help="ask for the tokens of each chunk"
    )
    group.add_argument(
        "--extra-body",
        type=json.loads,
        default='{"temperature": 0, "ignore_eos": true}',
        help="fields of each request, as JSON",
    )
    group.add_argument("--timeout", type=float, default=600.0, help="seconds for a whole answer")


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the clients and their prompts")
    group.add_argument("--processes", type=positive, default=4)
    group.add_argument("--warm-up", type=int, default=8, help="requests before the first run")
    group.add_argument("--repeat", type=positive, default=1)
    group.add_argument("--seed", type=int, help="of the first run's prompts; drawn if absent")
    group.add_argument("--text", action="store_true", help="send words instead of token ids")
    group.add_argument("--token-ids", type=lengths, default="100-9999", help="LEAST-MOST")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the report")
    group.add_argument("--slo-ttft-ms", type=float, default=float("inf"), help="for goodput")
    group.add_argument("--slo-tpot-ms", type=float, default=float("inf"), help="for goodput")
    group.add_argument("--no-progress", action="store_true")
    group.add_argument("--plot", type=Path, help="draw latency by load, or a time line")
    group.add_argument("--out", type=Path, help="append a JSON line for each figure")
    group.add_argument("--name", help="of the workload in --out and --plot")
    group.add_argument("--engine", default="minisgl", help="in --out")
    group.add_argument("--device", default="unknown", help="in --out")
    group.add_argument("--machine", help="in --out; this one if absent")
    group.add_argument("--tp", type=positive, default=1, help="in --out")


# ---- from flags to workloads


def _shape(args: argparse.Namespace) -> Shape:
    return Shape(args.input, args.output, args.shared, args.prefix_sets)


def _trace_workloads(args: argparse.Namespace) -> list[Workload]:
    part = Replay(args.speed, args.requests, args.duration, args.max_input)
    arrivals = read_trace(args.trace)
    workload = replay(args.name or f"{args.trace.stem} x {args.speed:g}", arrivals, part)
    if not workload.requests:
        raise ConfigError(f"--trace {args.trace} has no request within --duration and --max-input")
    return [workload]


def _closed_workloads(args: argparse.Namespace) -> list[Workload]:
    name = args.name or "closed"
    return [
        closed_loop(f"{name}, {level} at once", _shape(args), args.requests, level)
        for level in args.concurrency
    ]


def _poisson_workloads(args: argparse.Namespace) -> list[Workload]:
    name = args.name or "poisson"
    return [
        poisson(f"{name}, {rate:g} a second", _shape(args), args.requests, rate)
        for rate in args.rate
    ]


def _mixed_workloads(args: argparse.Namespace) -> list[Workload]:
    shape = MixedShape(
        args.streams,
        args.stream_input,
        args.stream_output,
        args.long,
        args.long_input,
        args.long_output,
        args.long_start,
        args.long_every,
    )
    return [mixed(args.name or "mixed", shape)]


# ---- the command


def api_key() -> str | None:
    """The key, which no flag gives because --out writes all flags down."""
    return os.environ.get("OPENAI_API_KEY")


def first_model(args: argparse.Namespace) -> str:
    """Ask the server which model it serves.

    Raises:
        ConfigError: it does not answer.
    """
    headers = {"Authorization": f"Bearer {api_key()}"} if api_key() else {}
    request = urllib.request.Request(f"{args.url.rstrip('/')}/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=args.timeout) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"--url {args.url} lists no models: {error}") from error


def make_bench(args: argparse.Namespace, seed: int) -> Bench:
    target = Target(
        args.url,
        args.model or first_model(args),
        api_key(),
        args.extra_body,
        args.continuous_usage,
        args.timeout,
    )
    return Bench(
        target,
        PromptMaker(seed, args.token_ids, args.text),
        Objective(args.slo_ttft_ms, args.slo_tpot_ms),
        args.processes,
        args.server_pid,
        shows_progress=not args.no_progress,
        seeds=iter(range(seed, sys.maxsize)),
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
    """One figure for each metric of each part, with its values of all runs that have it."""
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
    args = make_parser().parse_args(argv)
    try:
        _measure(args)
    except (ConfigError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error


def _measure(args: argparse.Namespace) -> None:
    workloads = args.make_workloads(args)
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4))
    bench = make_bench(args, seed)
    if args.warm_up:
        short = Shape((32, 32), (16, 16))
        bench.run(closed_loop("warm-up", short, args.warm_up, args.warm_up))
    all_runs = [(workload, _repeat(bench, workload, args.repeat)) for workload in workloads]
    if args.out:
        command = f"python -m minisgl.benchmark.serve {' '.join(sys.argv[1:])}"
        if args.seed is None:
            command += f" --seed {seed}"
        for workload, runs in all_runs:
            figures = figures_of(args, bench.target.model, workload, runs, command)
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
