"""Requests that wait, in one or several orders; all operations are O(log n) or less, also aborts.

An order is a function from a prefill to a key; the smallest key goes first. Priority comes first in
all orders.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minisgl.core import Req


@dataclass(slots=True, eq=False)
class Prefill:
    """The record of a prompt that is not computed yet: how many tokens are left.

    Attributes:
        num_left: tokens to compute. Until the request is admitted, those that were not in the
            prefix cache when it was queued.
        num_prefilled_before: tokens of all prompts that had been computed when it was queued.
        num_done: its own tokens that have been computed since then.
    """

    req: Req
    num_left: int
    num_prefilled_before: int = 0
    num_done: int = 0


Order: TypeAlias = Callable[[Prefill], tuple[int, ...]]


def by_arrival(prefill: Prefill) -> tuple[int, ...]:
    """By priority first; among equals first come, first served."""
    return (prefill.req.priority, prefill.req.place)


def by_length(prefill: Prefill) -> tuple[int, ...]:
    """By priority first; then by the tokens that are left to compute, then by arrival."""
    return (prefill.req.priority, prefill.num_left, prefill.req.place)


_Entry: TypeAlias = tuple[tuple[int, ...], int, Prefill]  # key, number, prefill


class RequestQueue:
    """Prefills that wait, sorted by each order. Their keys must not change while they wait.

    What has left the queue stays in the heaps of the orders. It is skipped when it comes first, and
    removed when much has left (lazy deletion).
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._waiting: dict[int, Prefill] = {}
        self._heaps: dict[Order, list[_Entry]] = {order: [] for order in orders}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self, order: Order) -> Prefill | None:
        """The prefill whose turn it is in an order; it stays in the queue."""
        heap = self._heaps[order]
        while heap:
            prefill = heap[0][-1]
            if self._waits(prefill):
                return prefill
            heapq.heappop(heap)
        return None

    def get(self, req: Req) -> Prefill | None:
        """The prefill of a request, if it is there."""
        return self._waiting.get(req.uid)

    def _waits(self, prefill: Prefill) -> bool:
        return self._waiting.get(prefill.req.uid) is prefill

    def add(self, prefill: Prefill) -> None:
        assert prefill.req.uid not in self._waiting
        self._waiting[prefill.req.uid] = prefill
        for order, heap in self._heaps.items():
            heapq.heappush(heap, (order(prefill), next(self._numbers), prefill))

    def discard(self, req: Req) -> None:
        """Remove the prefill of a request, if it is there."""
        if self._waiting.pop(req.uid, None) is None:
            return
        for heap in self._heaps.values():
            if len(heap) > 64 + 2 * len(self._waiting):
                heap[:] = [entry for entry in heap if self._waits(entry[-1])]
                heapq.heapify(heap)
