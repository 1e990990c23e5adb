"""A queue in which a long job does not keep short ones waiting, nor short ones a long one."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

J = TypeVar("J")


class FairQueue(Generic[J]):
    """Jobs in the order in which they would end if all flows shared one worker at all times.

    A flow is a sequence of jobs, such as the prompts of one request. The turn of a job is the work
    done when it came, or the turn of the job before it in its flow, plus its own cost. So a flow
    waits for earlier work, and for as much later work as it costs itself. Jobs of equal cost keep
    their order. The method is fair queueing by virtual time (Golestani 1994).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Hashable, J]] = []
        self._numbers = itertools.count()
        self._clock = 0  # turn of the job that was taken last
        self._last_turns: dict[Hashable, int] = {}  # of the flows that have jobs here

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, job: J, cost: int, flow: Hashable) -> None:
        """Add a job. Costs have any unit, the same for all jobs."""
        turn = max(self._clock, self._last_turns.get(flow, 0)) + cost
        self._last_turns[flow] = turn
        heapq.heappush(self._heap, (turn, next(self._numbers), flow, job))

    def take(self) -> J:
        """Remove the job whose turn it is. There must be one."""
        turn, _, flow, job = heapq.heappop(self._heap)
        self._clock = max(self._clock, turn)
        if self._last_turns.get(flow) == turn:
            del self._last_turns[flow]
        return job
