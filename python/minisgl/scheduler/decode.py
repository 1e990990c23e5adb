"""Running requests: those whose prompt is computed, oldest first.

A request gets pages as its tokens come, not for all of `max_tokens` at the start, so more requests
run than would fit if all went on to the end. When pages run short the least urgent request is
retracted, of equals the youngest. It gives its pages back as soon as no launched batch refers to
it, and is computed again from its tokens later.

Owns the set of running requests. Knows nothing of prompts.
"""

from __future__ import annotations

from minisgl.core import Req, ReqSlice
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.prefill import priority_of


class DecodeManager:
    """The running requests, in order of admission."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._running: dict[int, Req] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, req: Req) -> bool:
        return req.uid in self._running

    @property
    def running(self) -> list[Req]:
        return list(self._running.values())

    def add(self, req: Req) -> None:
        self._running[req.uid] = req

    def remove(self, req: Req) -> None:
        del self._running[req.uid]

    def plan(self) -> tuple[list[ReqSlice], bool]:
        """One token for each running request that is not full and has a page for it.

        Returns:
            the slices, and whether a request found no page; it waits for the next step. The longest
            contexts come first: where a kernel gives each request to a processor, the last to end
            should be a short one.
        """
        ready = [req for req in self._running.values() if not req.is_full]
        extended = [req for req in ready if self._cache.try_extend(req)]
        extended.sort(key=lambda req: req.num_tokens, reverse=True)
        slices = [ReqSlice(req, req.num_computed, req.num_tokens, samples=True) for req in extended]
        return slices, len(extended) < len(ready)

    @property
    def least_urgent(self) -> Req:
        """The request of the largest priority; among those the youngest."""
        return max(reversed(self._running.values()), key=priority_of)

    def retract(self) -> Req:
        """Take the least urgent request out, so that its pages can go to the others."""
        return self._running.pop(self.least_urgent.uid)
