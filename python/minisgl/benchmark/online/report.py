"""Computes figures from the records of a run: percentiles, throughput, goodput.

ttft    from sending a request to its first chunk with a token
tpot    of a request: the time after its first chunk, for each token that came later
gap     from one chunk of a stream to the next
itl     the same for each token: a gap is divided among the tokens of the chunk that ends it.
        Only where the server says how many tokens a chunk has.
e2e     from sending a request to the end of its answer
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.online.load import ClientReport
from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.workloads import LONG_PROMPTS, STREAMS

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
Figures = dict[str, float]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objective:
    """The service level objective: a request is good within both bounds."""

    ttft_ms: float = float("inf")
    tpot_ms: float = float("inf")

    def is_met(self, record: RequestRecord) -> bool:
        if not record.is_answered or record.ttft_s is None:
            return False
        tpot_ms = 1e3 * (record.tpot_s or 0.0)
        return 1e3 * record.ttft_s <= self.ttft_ms and tpot_ms <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Period:
    """A part of the load, in seconds from its start."""

    start_s: float = float("-inf")
    end_s: float = float("inf")

    def has(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s


ALWAYS = Period()


def summarize(records: Sequence[RequestRecord], objective: Objective) -> dict[str, Figures]:
    """Compute all figures of a run.

    Returns:
        The figures of each part of the load by the part's name; the whole load has an empty name.
    """
    answered = [record for record in records if record.is_answered]
    parts = {"": throughput(records, objective) | latencies(answered)}
    streams = [record for record in answered if record.group == STREAMS]
    long_prompts = [record for record in answered if record.group == LONG_PROMPTS]
    if streams and long_prompts:
        during = long_period(long_prompts)
        parts["streams before"] = gaps(streams, Period(end_s=during.start_s))
        parts["streams during"] = gaps(streams, during)
        parts[LONG_PROMPTS] = latencies(long_prompts)
    return parts


def long_period(long_prompts: Sequence[RequestRecord]) -> Period:
    """The time from the first long prompt to the first token of the last one."""
    firsts_s = [record.chunks_s[0] for record in long_prompts if record.chunks_s]
    return Period(min(record.sent_s for record in long_prompts), max(firsts_s, default=0.0))


def wall_s(records: Sequence[RequestRecord]) -> float:
    """From the first request to the end of the last one."""
    began_s = min(record.sent_s for record in records)
    return max(record.ended_s for record in records) - began_s


def throughput(records: Sequence[RequestRecord], objective: Objective) -> Figures:
    """Rates of the whole load; tokens of failed requests, and of those hung up, do not count."""
    answered = [record for record in records if record.is_answered]
    num_good = sum(objective.is_met(record) for record in records)
    seconds = wall_s(records)
    return {
        "requests": len(records),
        "failed": sum(record.error is not None for record in records),
        "hung_up": sum(record.has_hung_up for record in records),
        "wall_s": seconds,
        "out_tok_s": sum(record.num_output for record in answered) / seconds,
        "in_tok_s": sum(record.num_prompt for record in answered) / seconds,
        "requests_s": len(answered) / seconds,
        "goodput_requests_s": num_good / seconds,
        "goodput_share": num_good / len(records),
    }


def latencies(records: Iterable[RequestRecord]) -> Figures:
    chosen = list(records)
    ttfts_s = [record.ttft_s for record in chosen if record.ttft_s is not None]
    tpots_s = [record.tpot_s for record in chosen if record.tpot_s is not None]
    return {
        **percentiles("ttft", ttfts_s),
        **percentiles("tpot", tpots_s),
        **gaps(chosen, ALWAYS),
        **percentiles("e2e", [record.e2e_s for record in chosen]),
    }


def gaps(records: Sequence[RequestRecord], period: Period) -> Figures:
    """Gaps that end within a period, per chunk and, where known, per token."""
    chunk_gaps_s = [
        after_s - before_s
        for record in records
        for before_s, after_s in pairwise(record.chunks_s)
        if period.has(after_s)
    ]
    figures = percentiles("gap", chunk_gaps_s)
    if records and all(record.counts_tokens for record in records):
        itls_s = [itl_s for record in records for itl_s in _token_gaps(record, period)]
        figures |= percentiles("itl", itls_s)
    return figures


def _token_gaps(record: RequestRecord, period: Period) -> Iterable[float]:
    chunks = zip(pairwise(record.chunks_s), record.chunk_tokens[1:], strict=True)
    for (before_s, after_s), num_tokens in chunks:
        if period.has(after_s):
            yield from [(after_s - before_s) / max(1, num_tokens)] * num_tokens


def percentiles(name: str, values_s: Sequence[float]) -> Figures:
    """Percentiles in milliseconds by names such as `ttft_p50_ms`; empty if there are no values."""
    if not values_s:
        return {}
    found = np.percentile(np.asarray(values_s), list(PERCENTILES.values())) * 1e3
    return {
        f"{name}_{which}_ms": float(value) for which, value in zip(PERCENTILES, found, strict=True)
    }


def client_health(reports: Sequence[ClientReport]) -> Figures:
    """How busy the busiest client was, and how late event loops were."""
    lags_s = [lag_s for report in reports for lag_s in report.lags_s]
    return {
        "client_cpu_share": max(report.cpu_share for report in reports),
        **percentiles("client_lag", lags_s),
    }
