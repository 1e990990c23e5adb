"""Shares one resource among jobs of unknown length, so that none starves.

Whether a job is short cannot be known beforehand. So each job first gets a short turn. A job that
needs more waits for a long turn, behind others that do. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """A turn of a job: the first one, or a long one."""

    who: T
    is_long: bool


class Turns(Generic[T]):
    """The jobs that wait for a first turn and for a long turn, each in order of arrival.

    While both wait, each side gets half of the time. Time is counted, not turns: otherwise jobs
    that use their turns up would take more than half.

    Let no first turn take more than F seconds, and no long turn more than L. Then:

    * While a job waits for a long turn, first turns take at most L + F more than long turns do.
      So with j others before it, a long turn begins after at most (2 j + 1) L + F.
    * With n others before it, a first turn begins after at most 2 (n + 1) F + L, however many wait
      for long turns.

    One turn at a time: `take`, then `end`.
    """

    def __init__(self) -> None:
        # Ordered sets.
        self._first: dict[T, None] = {}
        self._long: dict[T, None] = {}
        # What first turns may take before the next long turn. If they took more, that is owed.
        self._left_s = 0.0

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._first) + len(self._long)

    def add(self, who: T) -> None:
        """Let a new job wait for its first turn."""
        self._first[who] = None

    def add_long(self, who: T) -> None:
        """Let a job wait for a long turn, because its first one was too short."""
        self._long[who] = None

    def discard(self, who: T) -> bool:
        """Remove a job; return whether it waited."""
        for waiting in (self._first, self._long):
            if who in waiting:
                del waiting[who]
                return True
        return False

    def take(self) -> Turn[T] | None:
        """Begin the next turn; None if no job waits."""
        is_long = bool(self._long) and (self._left_s <= 0 or not self._first)
        waiting = self._long if is_long else self._first
        if not waiting:
            return None
        who = next(iter(waiting))
        del waiting[who]
        return Turn(who, is_long)

    def end(self, turn: Turn[T], turn_s: float) -> None:
        """Note how long a turn took."""
        if turn.is_long:
            self._left_s = min(self._left_s, 0.0) + turn_s
        elif self._long:
            self._left_s -= turn_s
