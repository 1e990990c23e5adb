"""The command line of the benchmark: what it refuses, and the lines that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.benchmark.flags import make_parser
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.report import Objective, summarize
from minisgl.benchmark.online.workloads import Shape, closed_loop
from minisgl.benchmark.serve import Run, figures_of, main


def run(out_ms: float) -> Run:
    record = RequestRecord("requests", ended_s=1.0, chunks_s=[out_ms / 1e3], num_output=1)
    return Run(summarize([record], Objective()), [record])


def test_a_figure_has_the_values_of_all_runs_and_their_median() -> None:
    args = make_parser().parse_args(["w6", "--machine", "mine", "--device", "cpu"])
    workload = closed_loop("w6", Shape((1, 1), (1, 1)), 1, 1)
    runs = [run(30), run(10), run(20)]
    figures = {each.metric: each for each in figures_of(args, "tiny", workload, runs, "command")}

    assert figures["ttft_p50_ms"].values == pytest.approx([30, 10, 20])
    assert figures["ttft_p50_ms"].value == pytest.approx(20)
    assert figures["ttft_p50_ms"].workload == "w6"
    assert figures["ttft_p50_ms"].machine == "mine"
    assert figures["requests"].command == "command"


def test_several_levels_are_several_workloads() -> None:
    flags = ["poisson", "--rate", "1", "2.5", "--requests", "3", "--input", "5-9"]
    args = make_parser().parse_args(flags)
    workloads = args.make_workloads(args)

    assert [each.name for each in workloads] == ["poisson, 1 a second", "poisson, 2.5 a second"]
    assert [each.level for each in workloads] == [1, 2.5]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["trace", "--trace", "none.csv"], "error: --trace none.csv"),
        (["closed", "--url", "nowhere", "--model", "m"], "error: --url is nowhere"),
        (["closed", "--url", "http://127.0.0.1:1/v1"], "lists no models"),
    ],
)
def test_what_cannot_be_measured_is_said(flags: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        main(flags)


@pytest.mark.parametrize(
    "flags",
    [["--requests", "0"], ["--input", "9-5"], ["--concurrency", "0"], ["--token-ids", "many"]],
)
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["closed", *flags])
    assert flags[0] in capsys.readouterr().err


def test_a_trace_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")

    with pytest.raises(SystemExit, match="has no request within"):
        main(["trace", "--trace", str(trace), "--max-input", "10"])
