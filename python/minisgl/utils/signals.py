"""Duplicates of signals."""

from __future__ import annotations

import math
import time

# On a busy machine the sender may wait this long for a processor between its two signals.
_SAME_WISH_S = 0.3


class SignalPairs:
    """Tells a signal that is repeated on purpose from one that is sent twice at once.

    Some tools, such as `timeout`, send a signal to a program and then to all processes of its
    group, which include the program.
    """

    def __init__(self) -> None:
        self._came_at = -math.inf

    def is_second_of_pair(self) -> bool:
        """Note a signal; returns whether it belongs to the one before."""
        now = time.monotonic()
        belongs = now - self._came_at < _SAME_WISH_S
        if not belongs:
            self._came_at = now
        return belongs
