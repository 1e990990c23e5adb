"""Figures of records whose times are known, and tables and pictures of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from minisgl.benchmark.online.load import ClientReport
from minisgl.benchmark.online.plots import binned, draw_sweep, draw_time_line
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.report import Objective, client_health, percentiles, summarize
from minisgl.benchmark.online.tables import table
from minisgl.benchmark.online.workloads import LONG_PROMPTS, STREAMS


def record(*chunks_s: float, group: str = "requests", **fields: Any) -> RequestRecord:
    """A request that is sent at 0 and ends with its last chunk, with a token a chunk."""
    values = {"ended_s": chunks_s[-1], "num_output": len(chunks_s), "num_prompt": 10, **fields}
    return RequestRecord(group, chunks_s=list(chunks_s), **values)


FAILED = RequestRecord("requests", ended_s=0.1, error="HTTP 429")


def test_latencies_of_one_request() -> None:
    figures = summarize([record(0.2, 0.3, 0.6)], Objective())[""]

    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["tpot_p50_ms"] == pytest.approx(200)
    assert figures["gap_p50_ms"] == pytest.approx(200)
    assert figures["gap_max_ms"] == pytest.approx(300)
    assert figures["e2e_p99_ms"] == pytest.approx(600)
    assert figures["out_tok_s"] == pytest.approx(5)
    assert figures["in_tok_s"] == pytest.approx(10 / 0.6)


def test_a_gap_is_divided_among_the_tokens_of_its_chunk() -> None:
    joined = record(0.2, 0.3, 0.6, chunk_tokens=[2, 1, 3], num_output=6)
    figures = summarize([joined], Objective())[""]

    assert figures["itl_p50_ms"] == pytest.approx(100)  # four tokens after the first chunk
    assert figures["itl_max_ms"] == pytest.approx(100)
    assert figures["gap_max_ms"] == pytest.approx(300)
    assert figures["tpot_p50_ms"] == pytest.approx(100)


def test_gaps_per_token_are_not_guessed() -> None:
    figures = summarize([record(0.2, 0.3, chunk_tokens=[1, 1]), record(0.2, 0.3)], Objective())

    assert "itl_p50_ms" not in figures[""]


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    figures = summarize([record(0.2)], Objective())[""]

    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert "tpot_p50_ms" not in figures


def test_failed_requests_are_counted_and_left_out() -> None:
    figures = summarize([record(0.5, 1.0), FAILED], Objective())[""]

    assert figures["failed"] == 1
    assert figures["out_tok_s"] == pytest.approx(2)
    assert figures["e2e_p50_ms"] == pytest.approx(1000)
    assert figures["goodput_share"] == 0.5


def test_clients_that_hung_up_are_counted_and_left_out() -> None:
    hung_up = replace(record(0.2, 0.3), has_hung_up=True)
    figures = summarize([record(0.5, 1.0), hung_up], Objective())[""]

    assert (figures["failed"], figures["hung_up"]) == (0, 1)
    assert figures["out_tok_s"] == pytest.approx(2)
    assert figures["goodput_share"] == 0.5


@pytest.mark.parametrize(
    ("objective", "num_good"),
    [
        (Objective(), 2),
        (Objective(ttft_ms=300), 1),
        (Objective(tpot_ms=150), 1),
        (Objective(ttft_ms=300, tpot_ms=150), 0),
    ],
)
def test_goodput_counts_requests_within_both_bounds(objective: Objective, num_good: int) -> None:
    early_and_slow = record(0.2, 0.4)
    late_and_fast = record(0.9, 1.0)
    figures = summarize([early_and_slow, late_and_fast, FAILED], objective)[""]

    assert figures["goodput_requests_s"] == pytest.approx(num_good)
    assert figures["goodput_share"] == pytest.approx(num_good / 3)


def test_streams_are_reported_before_and_during_long_prompts() -> None:
    stream = record(0.1, 0.2, 0.9, 1.9, 2.0, group=STREAMS)
    long_prompts = [
        record(0.9, group=LONG_PROMPTS, sent_s=0.5),
        record(1.95, group=LONG_PROMPTS, sent_s=1.0),
    ]
    parts = summarize([stream, *long_prompts], Objective())

    assert parts["streams before"]["gap_max_ms"] == pytest.approx(100)
    assert parts["streams during"]["gap_max_ms"] == pytest.approx(1000)
    assert parts["streams during"]["gap_p50_ms"] == pytest.approx(850)  # neither 0.1 s is in
    assert parts[LONG_PROMPTS]["ttft_max_ms"] == pytest.approx(950)


def test_percentiles_of_nothing_are_absent() -> None:
    assert percentiles("ttft", []) == {}


def test_the_busiest_client_is_shown() -> None:
    reports = [ClientReport([], 0.2, [0.001]), ClientReport([], 0.7, [0.003])]

    assert client_health(reports)["client_cpu_share"] == 0.7
    assert client_health(reports)["client_lag_max_ms"] == pytest.approx(3)


def test_a_table_has_every_figure() -> None:
    figures = summarize([record(0.2, 0.3, 0.6)], Objective())[""]
    text = "\n".join(table(figures))

    assert "out_tok_s" in text
    assert [line for line in text.splitlines() if "ttft" in line] == [
        "  ttft, ms          " + "      200.00" * 4
    ]


# ---- pictures


def test_gaps_are_binned_by_their_end() -> None:
    times_s, medians_ms, maxima_ms = binned([(0.0, 0.04), (0.0, 0.08), (0.04, 0.35)])

    assert times_s == pytest.approx([0.0, 0.3])
    assert medians_ms == pytest.approx([60, 310])
    assert maxima_ms == pytest.approx([80, 310])


def test_pictures_are_drawn(tmp_path: Path) -> None:
    matplotlib.use("svg")
    records = [record(0.1, 0.2, group=STREAMS), record(0.9, group=LONG_PROMPTS)]
    points = {rate: summarize([record(0.1, rate)], Objective())[""] for rate in (1.0, 2.0)}

    draw_time_line(tmp_path / "line.svg", "w7", records)
    draw_sweep(tmp_path / "sweep.svg", "poisson", "requests a second", points)

    for name in ("line.svg", "sweep.svg"):
        assert (tmp_path / name).stat().st_size > 0
