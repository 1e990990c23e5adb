"""Requests that wait, in one or several orders. An operation costs O(log n), amortised.

An order is a function from a prompt to a key; the smallest key goes first. Priority comes first in
all orders. A schedule is the orders that share the steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minisgl.core import Req


@dataclass(slots=True, eq=False)
class PromptProgress:
    """How much of a prompt is computed, until all of it is.

    Attributes:
        num_left: tokens that are left to compute. While the request waits this is an estimate: how
            many were not in the prefix cache when it was queued. Admission makes it exact.
        num_prefilled_before: tokens of all prompts that had been computed when it was queued.
        num_done: its own tokens that have been computed since then.
        was_retracted: whether it was queued because it lost its pages.
    """

    req: Req
    num_left: int
    num_prefilled_before: int = 0
    num_done: int = 0
    was_retracted: bool = False


Order: TypeAlias = Callable[[PromptProgress], tuple[int, ...]]


def by_arrival(prompt: PromptProgress) -> tuple[int, ...]:
    """By priority first; among equals first come, first served."""
    return (prompt.req.priority, prompt.req.queue_number)


def by_length(prompt: PromptProgress) -> tuple[int, ...]:
    """By priority first; then by the tokens that are left to compute, then by arrival.

    The tokens of a prompt that waits are estimated; those of one that is partly computed are exact.
    """
    return (prompt.req.priority, prompt.num_left, prompt.req.queue_number)


# The orders of each schedule, by its name. Each gives out an equal share of a step's prompt tokens.
SCHEDULES: dict[str, list[Order]] = {
    "fcfs": [by_arrival],
    "short-first": [by_arrival, by_length],
}

# The key, a number that makes entries of equal keys comparable, and the prompt.
_Entry: TypeAlias = tuple[tuple[int, ...], int, PromptProgress]


class RequestQueue:
    """Prompts that wait, sorted by each order. Their keys must not change while they wait.

    A prompt that has left the queue stays in the heaps of the orders. It is skipped when it comes
    first, and removed when many have left (lazy deletion).
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._waiting: dict[int, PromptProgress] = {}
        self._heaps: dict[Order, list[_Entry]] = {order: [] for order in orders}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self, order: Order) -> PromptProgress | None:
        """The prompt whose turn it is in an order; it stays in the queue."""
        heap = self._heaps[order]
        while heap:
            prompt = heap[0][-1]
            if self._waits(prompt):
                return prompt
            heapq.heappop(heap)
        return None

    def get(self, req: Req) -> PromptProgress | None:
        """The prompt of a request, if it is there."""
        return self._waiting.get(req.uid)

    def _waits(self, prompt: PromptProgress) -> bool:
        return self._waiting.get(prompt.req.uid) is prompt

    def add(self, prompt: PromptProgress) -> None:
        assert prompt.req.uid not in self._waiting
        self._waiting[prompt.req.uid] = prompt
        for order, heap in self._heaps.items():
            heapq.heappush(heap, (order(prompt), next(self._numbers), prompt))

    def discard(self, req: Req) -> None:
        """Remove the prompt of a request, if it is there."""
        if self._waiting.pop(req.uid, None) is None:
            return
        for heap in self._heaps.values():
            if len(heap) > 64 + 2 * len(self._waiting):
                heap[:] = [entry for entry in heap if self._waits(entry[-1])]
                heapq.heapify(heap)
