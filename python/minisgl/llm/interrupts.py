"""Ctrl-C in the middle of a step: it takes effect when the step has ended.

A step that is broken off has left any state, and its `LLM` could not be used any more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let SIGINT wait for the end of the block; a second one takes effect at once.

    What it does then is what its handler does: by default it raises KeyboardInterrupt. Signals
    reach the main thread only, so in others nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append((number, frame))
        if len(waiting) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(waiting) == 1:
            handler(*waiting[0])
