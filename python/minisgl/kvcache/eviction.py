"""The order in which unlocked leaves of a prefix tree are evicted: least recently used first.

A heap finds the next one. An entry is stale when its node was used since, or has left the tree.
Stale entries are skipped when they are popped (lazy deletion), and so is an entry whose node is
locked or has a child: that node is offered again later. Each use of a node pushes at most one
entry, so eviction costs O(log n) per node, amortised. Time is a counter, not a clock, so all
tensor-parallel ranks evict the same nodes.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Generic, TypeVar


class Evictable(ABC):
    """A node of a prefix tree, with the state that the order keeps in it.

    Attributes:
        last_used: when it was used last. Uses of its descendants count once they are removed.
        heap_key: `last_used` in its newest entry of the heap; None if that was popped.
    """

    __slots__ = ("heap_key", "last_used")

    def __init__(self) -> None:
        self.last_used = 0
        self.heap_key: int | None = None

    @property
    @abstractmethod
    def is_evictable(self) -> bool:
        """Whether it is an unlocked leaf."""


NodeT = TypeVar("NodeT", bound=Evictable)


class EvictionOrder(Generic[NodeT]):
    """The nodes that may be evicted. The caller offers a node when it becomes evictable."""

    def __init__(self) -> None:
        self._now = 0
        self._heap: list[tuple[int, int, NodeT]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        """How many entries there are, stale ones included."""
        return len(self._heap)

    def tick(self) -> None:
        """Begin a new moment: nodes that are used from now on are used later than all before."""
        self._now += 1

    def use(self, node: NodeT) -> None:
        """Note that a node is used now."""
        node.last_used = self._now
        self.offer(node)

    def offer(self, node: NodeT) -> None:
        """Take a node into the order if it is evictable and has no entry for its last use."""
        if not node.is_evictable or node.heap_key == node.last_used:
            return
        node.heap_key = node.last_used
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.last_used, self._num_pushed, node))

    def forget(self, node: NodeT) -> None:
        """Make all entries of a node stale, because it leaves the tree."""
        node.last_used = 0  # its entry is stale now

    def pop(self) -> NodeT:
        """Remove and return the next node. There must be one."""
        while True:
            last_used, _, node = heapq.heappop(self._heap)
            if node.last_used != last_used:
                continue
            node.heap_key = None
            if node.is_evictable:
                return node

    def drop_stale(self, max_entries: int) -> None:
        """Remove stale entries if there are more than `max_entries`, stale or not."""
        if len(self._heap) > max_entries:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].last_used]
            heapq.heapify(self._heap)

    def check_integrity(self, node: NodeT) -> None:
        """Assert that an evictable node is in the order once."""
        ages = [last_used for last_used, _, other in self._heap if other is node]
        assert ages.count(node.last_used) == 1
