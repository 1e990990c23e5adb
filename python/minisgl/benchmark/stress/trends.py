"""Whether a number of a process grows: a slope with its confidence, from samples over time.

The slope is the median of those between all pairs of points (Sen 1968). Several processes of one
name, one after the other, each have a level of their own, so pairs are made within one process
only, and its interval is that of the seasonal Kendall test (Hirsch and Slack 1984): a process is a
season. Points are medians of `POINT_S` seconds, which makes neighbours depend less on each other.
The remaining dependence makes the interval too narrow, but does not bias the slope.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Literal

POINT_S = 10.0
CONFIDENCE = 0.95
_Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_HOUR_S = 3600.0

Verdict = Literal["flat", "grows", "unclear"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of a process, at a time in seconds."""

    pid: int
    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Trend:
    """How fast a number grows, in its unit per hour.

    Attributes:
        low, high: the bounds of the interval that contains the slope with `CONFIDENCE`.
        num_points: medians of `POINT_S` seconds, of all processes of the name.
        first, last: the medians of the first and the last tenth of the points.
    """

    per_hour: float
    low: float
    high: float
    num_points: int
    first: float
    last: float

    def verdict(self, bound: float) -> Verdict:
        """Flat if the whole interval is below the bound per hour, growing if it is above it."""
        if self.high < bound:
            return "flat"
        return "grows" if self.low > bound else "unclear"


def trend_of(samples: Iterable[Sample]) -> Trend | None:
    """The trend of a number over the samples; None if there are fewer than three points."""
    points_of: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for pid, of_pid in groupby(sorted(samples, key=lambda s: (s.pid, s.at_s)), lambda s: s.pid):
        points_of[pid] = _points(of_pid)
    slopes = sorted(slope for points in points_of.values() for slope in _slopes(points))
    if len(slopes) < 3:
        return None
    variance = sum(_variance(len(points)) for points in points_of.values())
    half_width = _Z * math.sqrt(variance)
    rank = max(0, math.floor((len(slopes) - half_width) / 2))
    in_time = [value for _, value in sorted(point for each in points_of.values() for point in each)]
    tenth = max(1, len(in_time) // 10)
    return Trend(
        statistics.median(slopes),
        slopes[rank],
        slopes[-1 - rank],
        len(in_time),
        statistics.median(in_time[:tenth]),
        statistics.median(in_time[-tenth:]),
    )


def _points(samples: Iterable[Sample]) -> list[tuple[float, float]]:
    """Time and value, in medians of `POINT_S` seconds."""
    points = []
    for _, group in groupby(samples, lambda sample: sample.at_s // POINT_S):
        of_point = list(group)
        at_s = statistics.fmean(sample.at_s for sample in of_point)
        points.append((at_s, statistics.median(sample.value for sample in of_point)))
    return points


def _slopes(points: Sequence[tuple[float, float]]) -> list[float]:
    return [
        (later[1] - earlier[1]) / (later[0] - earlier[0]) * _HOUR_S
        for earlier, later in combinations(points, 2)
    ]


def _variance(num_points: int) -> float:
    """The variance of Kendall's sum over all pairs of points that have no trend."""
    return num_points * (num_points - 1) * (2 * num_points + 5) / 18
