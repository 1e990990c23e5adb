"""What is made once is one object for all threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import pytest

from minisgl.utils.once import made_once


def test_threads_that_ask_at_a_time_get_the_same() -> None:
    both_make = Barrier(2)

    @made_once
    def make(name: str) -> list[str]:
        with suppress(BrokenBarrierError):  # the other one does not come
            both_make.wait(0.5)
        return [name]

    with ThreadPoolExecutor(2) as threads:
        one, another = threads.map(make, ["kernels", "kernels"])
    assert one is another
    assert make("others") == ["others"]


def test_what_fails_is_made_again() -> None:
    outcomes = iter([RuntimeError("no compiler"), "made"])

    @made_once
    def make() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    with pytest.raises(RuntimeError, match="no compiler"):
        make()
    assert make() == make() == "made"
