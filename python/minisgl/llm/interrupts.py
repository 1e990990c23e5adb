"""A signal in the middle of a step takes effect when the step has ended.

Its handler may raise: after Ctrl-C, or after an alarm by which a program bounds the time of a call.
A step that is interrupted leaves an undefined state, and its `LLM` could not be used any more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGALRM)


class _Waiting:
    """A handler that lets the first signal wait for the end of a block.

    Args:
        handler: what the program set for the signal.

    Attributes:
        frames: where the signals that have come broke in.
    """

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._number = number
        self._handler = handler
        self.frames: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.frames.append(frame)
        if len(self.frames) > 1:
            self._handler(number, frame)

    def begin(self) -> None:
        signal.signal(self._number, self)

    def end(self) -> None:
        """Set the program's handler again."""
        signal.signal(self._number, self._handler)

    def handle(self) -> None:
        """Handle the signal that has waited, if there is one."""
        if len(self.frames) == 1:
            self._handler(self._number, self.frames[0])


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let SIGINT and SIGALRM wait for the end of the block; a second one takes effect at once.

    What it does then is what its handler does: by default SIGINT raises KeyboardInterrupt. Signals
    reach the main thread only, so in others nothing changes. A block inside another is part of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[_Waiting] = []
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, _Waiting):
            waiting.append(_Waiting(number, handler))
    try:
        for each in waiting:
            each.begin()
        yield
    finally:
        try:
            for each in waiting:
                each.end()
        except BaseException:  # of a signal, as soon as its own handler is set
            for each in waiting:
                each.end()
            raise
        for each in waiting:
            each.handle()
