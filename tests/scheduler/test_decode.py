"""Who of the running requests is the least urgent."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from minisgl.core import Req
from minisgl.scheduler.decode import DecodeManager
from tests.scheduler.harness import exactly


def running(*priorities: int) -> tuple[DecodeManager, list[Req]]:
    """Requests that began to run in this order."""
    decode = DecodeManager(cast(Any, None))
    known = np.zeros(1, dtype=np.int32)
    reqs = [
        Req(uid, known, exactly(1, priority), max_length=2, seed=0)
        for uid, priority in enumerate(priorities)
    ]
    for req in reqs:
        decode.add(req)
    return decode, reqs


def test_of_equals_the_youngest_is_the_least_urgent() -> None:
    decode, [_, second, third] = running(0, 5, 5)
    assert decode.least_urgent is third
    assert decode.least_urgent_of({second, third}) is third
    decode.remove(third)
    assert decode.least_urgent is second


def test_a_larger_priority_counts_before_age() -> None:
    decode, [first, second, third] = running(0, 5, 1)
    assert decode.least_urgent_of({first, second, third}) is second
    assert decode.least_urgent is second


def test_who_is_not_asked_for_is_not_found() -> None:
    decode, [first, second, _] = running(0, 1, 5)
    assert decode.least_urgent_of({first, second}) is second
    assert decode.least_urgent_of({first}) is first
