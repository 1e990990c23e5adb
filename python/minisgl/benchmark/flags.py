"""The flags of `serve`, and the workloads that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisgl.benchmark.arguments import (
    delay,
    duration,
    factor,
    json_object,
    lengths,
    limit,
    natural,
    output_file,
    positive,
    share,
)
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
from minisgl.errors import ConfigError
from minisgl.utils.standard_streams import Parser


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Make the parser. `make_workloads` makes the workloads from its result."""
    parser = Parser(
        prog="python -m minisgl.benchmark.serve",
        description=description,
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
    parser.add_argument("--speed", type=factor, default=1.0, help="of the trace's clock")
    parser.add_argument("--requests", type=positive, default=1000, help="the trace's first ones")
    parser.add_argument("--duration", type=limit, default=float("inf"), help="seconds of arrivals")
    parser.add_argument(
        "--max-input", type=positive, default=40_960, help="longer prompts are left out"
    )
    parser.set_defaults(make_workloads=_trace_workloads)


def _add_closed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[256])
    _add_shape_flags(parser)
    parser.set_defaults(make_workloads=_closed_workloads)


def _add_poisson_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=factor, nargs="+", required=True, help="requests a second")
    _add_shape_flags(parser)
    parser.set_defaults(make_workloads=_poisson_workloads)


def _add_shape_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive, default=1024)
    parser.add_argument("--input", type=lengths, default="128", help="tokens, or LEAST-MOST")
    parser.add_argument("--output", type=lengths, default="256", help="tokens, or LEAST-MOST")
    parser.add_argument(
        "--shared", type=natural, default=0, help="further tokens, which prompts share"
    )
    parser.add_argument("--prefix-sets", type=positive, default=1, help="sets that share them")
    parser.add_argument(
        "--hang-up",
        type=share,
        default=0.0,
        help="part of the clients that hang up, anywhere in the answer",
    )


def _add_mixed_flags(parser: argparse.ArgumentParser) -> None:
    shape = MixedShape()
    parser.add_argument("--streams", type=positive, default=shape.num_streams)
    parser.add_argument("--stream-input", type=positive, default=shape.stream_input)
    parser.add_argument("--stream-output", type=positive, default=shape.stream_output)
    parser.add_argument("--long", type=positive, default=shape.num_long, help="long prompts")
    parser.add_argument("--long-input", type=positive, default=shape.long_input)
    parser.add_argument("--long-output", type=positive, default=shape.long_output)
    parser.add_argument("--long-start", type=delay, default=shape.long_start_s, help="seconds")
    parser.add_argument("--long-every", type=delay, default=shape.long_every_s, help="seconds")
    parser.set_defaults(make_workloads=_mixed_workloads)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument("--url", default="http://127.0.0.1:8000/v1", help="up to and with /v1")
    group.add_argument("--model", help="the first one that the server lists if absent")
    group.add_argument(
        "--server-pid",
        type=positive,
        help="whose processes to measure; else the local port's listener",
    )
    group.add_argument(
        "--continuous-usage", action="store_true", help="ask for the tokens of each chunk"
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default='{"temperature": 0, "ignore_eos": true}',
        help="fields of each request, as JSON",
    )
    group.add_argument("--timeout", type=duration, default=600.0, help="seconds for a whole answer")


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the clients and their prompts")
    group.add_argument("--processes", type=positive, default=4)
    group.add_argument("--warm-up", type=natural, default=8, help="requests before the first run")
    group.add_argument("--repeat", type=positive, default=1)
    group.add_argument("--seed", type=natural, help="of the prompts of all runs; drawn if absent")
    group.add_argument("--text", action="store_true", help="send words instead of token ids")
    group.add_argument("--token-ids", type=lengths, default="100-9999", help="LEAST-MOST")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the report")
    group.add_argument("--slo-ttft-ms", type=limit, default=float("inf"), help="for goodput")
    group.add_argument("--slo-tpot-ms", type=limit, default=float("inf"), help="for goodput")
    group.add_argument("--no-progress", action="store_true")
    group.add_argument("--plot", type=output_file, help="draw latency by load, or a time line")
    group.add_argument("--out", type=output_file, help="append a JSON line for each figure")
    group.add_argument("--name", help="of the workload in --out and --plot")
    group.add_argument("--engine", default="minisgl", help="in --out")
    group.add_argument("--device", default="unknown", help="in --out")
    group.add_argument("--machine", help="in --out; this one if absent")
    group.add_argument("--tp", type=positive, default=1, help="in --out")


# ---- from flags to workloads


def _shape(args: argparse.Namespace) -> Shape:
    return Shape(args.input, args.output, args.shared, args.prefix_sets, args.hang_up)


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
