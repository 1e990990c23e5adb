"""Requests whose prompt is not computed yet: admission, and chunked prefill.

Requests are admitted by priority, then in order of arrival. Chunking follows Sarathi-Serve (Agrawal
et al. 2024, arXiv:2403.02310): a prompt is computed in chunks that fit the step's token budget,
beside the decodes of that step. A long prompt therefore delays no request by more than one step.
Only the request at the head can be half computed.

A request is not admitted in a step that computes a long common prefix for another request. It waits
one step, and finds that prefix in the cache.

Owns the queue. Knows nothing of decoding; pages come from the cache manager.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from operator import attrgetter

from minisgl.core import Req, ReqSlice
from minisgl.kernel import common_prefix_length
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.events import Events, RequestAdmitted
from minisgl.scheduler.table import TableManager

# Tokens that a prompt must have in common with one that is being computed for it to wait a step.
_MIN_COMMON = 256
_by_priority = attrgetter("priority")


class PrefillManager:
    """A queue by priority, the smallest first; among equal ones, first come, first served.

    Waiting long does not change a priority. A retracted request goes before the others of its
    priority.
    """

    def __init__(self, cache: CacheManager, table: TableManager, events: Events) -> None:
        self._cache = cache
        self._table = table
        self._events = events
        self._queue: deque[Req] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def half_computed(self) -> Req | None:
        """The request at the head, if it has been admitted."""
        return self._queue[0] if self._queue and self._queue[0].row is not None else None

    def add(self, req: Req) -> None:
        insort_right(self._queue, req, lo=self._num_half_computed, key=_by_priority)

    def put_back(self, req: Req) -> None:
        """Requeue a retracted request; its answer so far has become part of its prompt.

        It comes before others of its priority, but after one that is half computed: that one holds
        pages, and must go on to free them.
        """
        assert req.row is None
        insort_left(self._queue, req, lo=self._num_half_computed, key=_by_priority)

    @property
    def _num_half_computed(self) -> int:
        return 1 if self.half_computed else 0

    def remove(self, req: Req) -> None:
        if req in self._queue:
            self._queue.remove(req)

    def retract(self, priority: int) -> Req | None:
        """Remove and return the half computed request; None if there is none or it is more urgent.

        Among requests of equal priority it is retracted first, because it is the youngest.

        Args:
            priority: of the least urgent running request.
        """
        req = self.half_computed
        return self._queue.popleft() if req and req.priority >= priority else None

    def plan(self, budget: int, num_running: int, *, may_admit: bool) -> list[ReqSlice]:
        """Plan prompt slices within `budget`: last chunks, and at most one that is not the last.

        A request whose last chunk is planned leaves the queue.

        Args:
            num_running: requests that may each need another page soon; that many pages are left.
            may_admit: whether requests may be admitted that are not half computed.
        """
        slices: list[ReqSlice] = []
        while budget > 0 and self._queue:
            req = self._queue[0]
            if req.row is None and not (may_admit and self._try_admit(req, slices, num_running)):
                break
            end = min(req.num_tokens, req.num_computed + budget)
            slices.append(ReqSlice(req, req.num_computed, end, samples=end == req.num_tokens))
            budget -= len(slices[-1])
            if end < req.num_tokens:
                break
            self._queue.popleft()
        return slices

    def _should_wait(self, req: Req, slices: list[ReqSlice]) -> bool:
        """Whether this step computes much of its prompt for another request.

        In the next step that prefix is cached.
        """
        if not self._cache.caches_prefixes or req.scores_prompt:
            return False
        return any(_num_common(req, chunk) >= _MIN_COMMON for chunk in slices)

    def _try_admit(self, req: Req, slices: list[ReqSlice], num_running: int) -> bool:
        if not self._table.has_free or self._should_wait(req, slices):
            return False
        if not self._cache.try_admit(req, reserve=num_running + len(slices)):
            return False
        if self._events.request_admitted:
            event = RequestAdmitted(req.uid, req.num_tokens, num_cached=req.num_computed)
            self._events.request_admitted.emit(event)
        return True


def _num_common(req: Req, chunk: ReqSlice) -> int:
    """Leading tokens of a request that the cache can supply once a chunk is computed.

    Only a prompt's last chunk counts: a prefix is published when all of it is launched.
    """
    if not chunk.samples or req.namespace != chunk.req.namespace:
        return 0
    known = req.tokens[: req.num_known]
    return common_prefix_length(known, chunk.req.tokens[: chunk.end]) - chunk.start
