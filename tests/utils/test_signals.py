"""Signals that come twice at once count as one."""

from __future__ import annotations

import time

import pytest

from minisgl.utils.signals import SignalPairs


def test_a_signal_that_comes_twice_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = SignalPairs()
    belongs = []
    for now in (50.0, 50.001, 50.25, 50.4, 50.65):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        belongs.append(pairs.is_second_of_pair())
    assert belongs == [False, True, True, False, True]
