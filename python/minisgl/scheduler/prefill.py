"""Requests whose prompt is not computed yet: admission, and chunked prefill.

Requests are admitted by priority, then in order of arrival. Chunking follows Sarathi-Serve (Agrawal
et al. 2024, arXiv:2403.02310): a prompt is computed in chunks that fit the step's token budget,
beside the decodes of that step. A long prompt therefore delays no request by more than one step.
Only the request at the head can be half computed.

The prompt of a last chunk is published when it is planned. A request that is planned after it in
the same step finds the prefix in the cache: in each layer, the keys and values of all slices are
written before any slice attends. So what several prompts have in common is computed once, and none
waits for another.

Owns the queue. Knows nothing of decoding; pages come from the cache manager.
"""

from __future__ import annotations

from minisgl.core import Req, ReqSlice
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.events import Events, RequestAdmitted
from minisgl.scheduler.request_queue import RequestQueue
from minisgl.scheduler.table import TableManager


class PrefillManager:
    """The requests that wait, and the one whose prompt is half computed.

    That one holds pages, and goes on before all others, to free them.
    """

    def __init__(self, cache: CacheManager, table: TableManager, events: Events) -> None:
        self._cache = cache
        self._table = table
        self._events = events
        self._queue = RequestQueue()
        self.half_computed: Req | None = None

    def __len__(self) -> int:
        """How many requests wait, without the half computed one."""
        return len(self._queue)

    def add(self, req: Req) -> None:
        self._queue.add(req)

    def put_back(self, req: Req) -> None:
        """Requeue a retracted request; its answer so far has become part of its prompt.

        It comes before others of its priority.
        """
        assert req.row is None
        self._queue.add_first(req)

    def remove(self, req: Req) -> None:
        """Forget a request that has ended. It may be none of these."""
        if req is self.half_computed:
            self.half_computed = None
        else:
            self._queue.discard(req)

    def retract(self, priority: int) -> Req | None:
        """Remove and return the half computed request; None if there is none or it is more urgent.

        Among requests of equal priority it is retracted first, because it is the youngest.

        Args:
            priority: of the least urgent running request.
        """
        req = self.half_computed
        if req is None or req.priority < priority:
            return None
        self.half_computed = None
        return req

    def plan(self, budget: int, num_running: int, *, may_admit: bool) -> list[ReqSlice]:
        """Plan prompt slices within `budget`: last chunks, and at most one that is not the last.

        Args:
            num_running: requests that may each need another page soon; that many pages are left.
            may_admit: whether requests may be admitted that are not half computed.
        """
        chunks: list[ReqSlice] = []
        while budget > 0:
            req = self.half_computed
            if req is None and may_admit:
                req = self._admit_next(reserve=num_running + len(chunks))
            if req is None:
                break
            chunks.append(self._next_chunk(req, budget))
            budget -= len(chunks[-1])
        return chunks

    def _next_chunk(self, req: Req, budget: int) -> ReqSlice:
        """As much of an admitted request as the budget allows. It goes on if that is not all."""
        end = min(req.num_tokens, req.num_computed + budget)
        is_last = end == req.num_tokens
        if is_last:
            self._cache.publish(req, end)
        self.half_computed = None if is_last else req
        return ReqSlice(req, req.num_computed, end, samples=is_last)

    def _admit_next(self, reserve: int) -> Req | None:
        """Admit the first request that waits; None if there is none or no room for it."""
        req = self._queue.first
        if req is None or not self._table.has_free or not self._cache.try_admit(req, reserve):
            return None
        self._queue.pop()
        if self._events.request_admitted:
            event = RequestAdmitted(req.uid, req.num_tokens, num_cached=req.num_computed)
            self._events.request_admitted.emit(event)
        return req
