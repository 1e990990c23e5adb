"""Bounds the work that connections do in each turn of the event loop.

Otherwise, hundreds of clients that send or hang up at once would make one long turn, and all others
would wait for its end. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class TurnQueue:
    """Callbacks, of which at most `max_runs` run in one turn of the event loop.

    The others wait in the order in which they came.
    """

    def __init__(self, max_runs: int) -> None:
        self._max_runs = max_runs
        self._num_runs = 0  # in this turn
        self._waiting: deque[Callable[[], None]] = deque()

    def run(self, callback: Callable[[], None]) -> bool:
        """Run a callback now, or later if its turn has not come. Returns whether it has run."""
        if self._waiting or self._num_runs == self._max_runs:
            self._waiting.append(callback)
            return False
        self._note_run()
        callback()
        return True

    def _note_run(self) -> None:
        if self._num_runs == 0:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_runs += 1

    def _begin_turn(self) -> None:
        """Run waiting callbacks. After one that raises, the others run in the next turn."""
        self._num_runs = 0
        while self._waiting and self._num_runs < self._max_runs:
            self._note_run()
            self._waiting.popleft()()
