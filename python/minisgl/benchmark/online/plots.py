"""Plots of a run, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.benchmark.online.records import RequestRecord
from minisgl.benchmark.online.report import Figures
from minisgl.benchmark.online.workloads import LONG_PROMPTS
from minisgl.errors import ConfigError

_BIN_S = 0.1


def check_plot(path: Path) -> None:
    """
    Raises:
        ConfigError: matplotlib is missing, or cannot write such a file.
    """
    formats = _pyplot().figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"--plot is {path}; it must end in one of {', '.join(sorted(formats))}")


def draw_time_line(path: Path, title: str, records: Sequence[RequestRecord]) -> None:
    """Draw gaps between chunks over time, and the wait for each long prompt's first token."""
    pyplot = _pyplot()
    streams = [record for record in records if record.group != LONG_PROMPTS]
    gaps = [pair for record in streams for pair in pairwise(record.chunks_s)]
    times_s, medians_ms, maxima_ms = binned(gaps)
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    axes.plot(times_s, maxima_ms, label="longest gap", linewidth=1)
    axes.plot(times_s, medians_ms, label="median gap", linewidth=1)
    answered = [record for record in records if record.chunks_s]
    waits = [record for record in answered if record.group == LONG_PROMPTS]
    for record in waits:
        axes.axvspan(record.sent_s, record.chunks_s[0], alpha=0.15, color="grey", linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel(
        "seconds" + ("; grey: a long prompt waits for its first token" if waits else "")
    )
    axes.set_ylabel(f"ms between chunks, in {1e3 * _BIN_S:.0f} ms")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def binned(gaps: Sequence[tuple[float, float]]) -> tuple[list[float], list[float], list[float]]:
    """
    Args:
        gaps: the start and end of each, in seconds.

    Returns:
        for each interval in which gaps have ended: its start in seconds, and the median and the
        maximum of the gaps in milliseconds.
    """
    bins: dict[int, list[float]] = {}
    for before_s, after_s in gaps:
        bins.setdefault(int(after_s / _BIN_S), []).append(1e3 * (after_s - before_s))
    return (
        [index * _BIN_S for index in sorted(bins)],
        [float(np.median(bins[index])) for index in sorted(bins)],
        [max(bins[index]) for index in sorted(bins)],
    )


def draw_sweep(path: Path, title: str, level_name: str, points: dict[float, Figures]) -> None:
    """Draw latencies against the offered load.

    Args:
        points: figures by level.
    """
    pyplot = _pyplot()
    figure, all_axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axes, latency in zip(all_axes, ("ttft", "tpot", "gap"), strict=True):
        for which in ("p50", "p99"):
            name = f"{latency}_{which}_ms"
            levels = [level for level, figures in points.items() if name in figures]
            axes.plot(levels, [points[level][name] for level in levels], "o-", label=which)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(level_name)
        axes.set_ylabel(f"{latency}, ms")
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install minisgl[bench]") from error
    return pyplot
