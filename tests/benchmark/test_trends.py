"""A slope and its interval, against numbers that are made with a known slope."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from minisgl.benchmark.stress.trends import POINT_S, Sample, Trend, trend_of

HOUR_S = 3600
BOUND = 10.0


def samples_of(
    value: Callable[[float], float], pid: int = 1, minutes: int = 30, begin_s: float = 0
) -> list[Sample]:
    """A number of a process, each second."""
    times_s = [begin_s + second for second in range(60 * minutes)]
    return [Sample(pid, at_s, value(at_s)) for at_s in times_s]


def test_a_line_has_its_slope() -> None:
    trend = trend_of(samples_of(lambda at_s: 100 + 36 * at_s / HOUR_S))

    assert trend is not None
    assert trend.per_hour == pytest.approx(36)
    assert trend.low == pytest.approx(36)
    assert trend.high == pytest.approx(36)
    assert trend.num_points == 30 * 60 / POINT_S
    assert trend.first < trend.last
    assert trend.verdict(BOUND) == "grows"


def test_noise_and_outliers_are_flat() -> None:
    random = Random(0)

    def value(_at_s: float) -> float:
        return 100 + random.gauss(0, 1) + 500 * (random.random() < 0.05)

    trend = trend_of(samples_of(value))

    assert trend is not None
    assert trend.low < 0 < trend.high
    assert trend.verdict(BOUND) == "flat"


def test_a_leak_under_noise_grows() -> None:
    random = Random(0)

    trend = trend_of(samples_of(lambda at_s: 30 * at_s / HOUR_S + random.gauss(0, 1)))

    assert trend is not None
    assert trend.low < 30 < trend.high
    assert trend.verdict(BOUND) == "grows"


def test_processes_at_other_levels_do_not_make_a_slope() -> None:
    samples = [
        sample
        for pid in range(1, 6)
        for sample in samples_of(lambda _at_s, pid=pid: 100.0 * pid, pid, 5, pid * 400)
    ]

    trend = trend_of(samples)

    assert trend is not None
    assert trend.per_hour == 0
    assert trend.verdict(BOUND) == "flat"


def interval_of_noise(seed: int) -> tuple[float, float]:
    random = Random(seed)
    trend = trend_of(samples_of(lambda _at_s: random.gauss(0, 50), minutes=5))
    assert trend is not None
    assert trend.low <= trend.per_hour <= trend.high
    return trend.low, trend.high


def test_the_interval_has_the_slope_about_as_often_as_it_says() -> None:
    intervals = [interval_of_noise(seed) for seed in range(200)]

    num_hits = sum(low <= 0 <= high for low, high in intervals)
    assert 0.9 < num_hits / len(intervals) < 0.99


def test_a_wide_interval_around_the_bound_leaves_it_open() -> None:
    trend = Trend(9, low=-50, high=70, num_points=6, first=0, last=0)

    assert trend.verdict(BOUND) == "unclear"


def test_too_few_samples_have_no_trend() -> None:
    assert trend_of([]) is None
    assert trend_of([Sample(1, 0, 1.0), Sample(1, POINT_S, 2.0)]) is None
