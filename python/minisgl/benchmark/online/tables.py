"""Figures as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.benchmark.online.report import PERCENTILES, Figures

_LATENCIES = ("ttft", "tpot", "gap", "itl", "e2e", "client_lag")


def table(figures: Figures) -> Iterator[str]:
    """Lines with the percentiles of each latency, and lines with all other figures."""
    rest = dict(figures)
    rows = []
    for name in _LATENCIES:
        row = [rest.pop(f"{name}_{which}_ms", None) for which in PERCENTILES]
        cells = [f"{value:12,.2f}" for value in row if value is not None]
        if cells:
            rows.append(f"  {name + ', ms':18}" + "".join(cells))
    for name, value in rest.items():
        yield f"  {name:18}{value:12,.2f}"
    if rows:
        yield " " * 20 + "".join(f"{which:>12}" for which in PERCENTILES)
        yield from rows
