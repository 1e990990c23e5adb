"""Requests that wait, by priority; all operations are O(log n) or less, also those of an abort."""

from __future__ import annotations

import heapq

from minisgl.core import Req

_Place = tuple[int, int, int]  # priority, order among equal ones, uid


class RequestQueue:
    """The smallest priority goes first; among equal ones, first come, first served.

    Waiting long does not change a priority. A discarded request leaves its place in the heap
    behind. Such places are skipped when they come first, and removed when they are many (lazy
    deletion).
    """

    def __init__(self) -> None:
        self._reqs: dict[int, Req] = {}
        self._places: list[_Place] = []
        self._last = 0
        self._first = 0

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def first(self) -> Req | None:
        """The request whose turn it is; it stays in the queue."""
        while self._places:
            uid = self._places[0][2]
            if uid in self._reqs:
                return self._reqs[uid]
            heapq.heappop(self._places)
        return None

    def add(self, req: Req) -> None:
        """Add a request behind others of its priority."""
        self._last += 1
        self._push(req, self._last)

    def add_first(self, req: Req) -> None:
        """Add a request before others of its priority."""
        self._first -= 1
        self._push(req, self._first)

    def _push(self, req: Req, order: int) -> None:
        assert req.uid not in self._reqs
        self._reqs[req.uid] = req
        heapq.heappush(self._places, (req.priority, order, req.uid))

    def pop(self) -> Req:
        """Remove and return the request whose turn it is."""
        req = self.first
        assert req is not None
        heapq.heappop(self._places)
        return self._reqs.pop(req.uid)

    def discard(self, req: Req) -> None:
        """Remove a request that has ended, if it is there."""
        if self._reqs.pop(req.uid, None) is None:
            return
        if len(self._places) > 64 + 2 * len(self._reqs):
            self._places = [place for place in self._places if place[2] in self._reqs]
            heapq.heapify(self._places)
