"""Ctrl-C in the middle of a step: it takes effect when the step has ended.

A step that is broken off has left any state, and its `LLM` could not be used any more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Waiting:
    """A handler that lets the first signal wait for the end of a block.

    Attributes:
        signals: those that have come, as a handler gets them.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self.signals: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signals.append((number, frame))
        if len(self.signals) > 1:
            self._handler(number, frame)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let SIGINT wait for the end of the block; a second one takes effect at once.

    What it does then is what its handler does: by default it raises KeyboardInterrupt. Signals
    reach the main thread only, so in others nothing changes. A block inside another is part of it.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Waiting):
        yield
        return
    waiting = _Waiting(handler)
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(waiting.signals) == 1:
            handler(*waiting.signals[0])
