"""Signals that come while handlers are changed: each program's own handler is set again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minisgl.llm.interrupts import interrupts_wait


def raise_timeout(*_: object) -> None:
    raise TimeoutError


HANDLERS: dict[int, Callable[..., Any]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGALRM: raise_timeout,
}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("coming", HANDLERS)
@pytest.mark.parametrize("change", range(4))
def test_a_signal_between_two_changes_of_handlers_leaves_none_behind(
    change: int, coming: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two handlers are set at the beginning of a block, and two at its end."""
    set_handler = signal.signal
    num_changes = 0

    def set_then_raise(number: int, handler: Any) -> None:
        nonlocal num_changes
        set_handler(number, handler)
        num_changes += 1
        if num_changes == change + 1:
            signal.raise_signal(coming)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", set_then_raise)
        with pytest.raises((KeyboardInterrupt, TimeoutError)), interrupts_wait():
            pass
    assert {number: signal.getsignal(number) for number in HANDLERS} == HANDLERS
