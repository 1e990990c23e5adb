"""Requests whose prompt is not computed yet: admission, and chunked prefill.

Requests are admitted by priority, then in order of arrival. Chunking follows Sarathi-Serve (Agrawal
et al. 2024, arXiv:2403.02310): a prompt is computed in chunks that fit the step's token budget,
beside the decodes of that step. A long prompt therefore delays no request by more than one step.
Only the request at the head can be half computed.

Owns the queue. Knows nothing of decoding; pages come from the cache manager.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque

from minisgl.core import Req, ReqSlice
from minisgl.kernel import common_prefix_length
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.events import Events, RequestAdmitted
from minisgl.scheduler.table import TableManager

# Tokens that a prompt must have in common with one that is being computed for it to wait a step.
_MIN_COMMON = 256


def priority_of(req: Req) -> int:
    return req.params.priority


class PrefillManager:
    """A queue by priority, the smallest first; first come, first served among equal ones.

    Waiting long does not change a priority. A retracted request goes back to the head of its
    equals.
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
        insort_right(self._queue, req, lo=self._num_half_computed, key=priority_of)

    def put_back(self, req: Req) -> None:
        """Requeue a retracted request; its answer so far has become part of its prompt.

        It comes before its equals, but behind one that is half computed: that one holds pages, and
        must go on to free them.
        """
        assert req.row is None
        insort_left(self._queue, req, lo=self._num_half_computed, key=priority_of)

    @property
    def _num_half_computed(self) -> int:
        return 1 if self.half_computed else 0

    def remove(self, req: Req) -> None:
        if req in self._queue:
            self._queue.remove(req)

    def retract(self, priority: int) -> Req | None:
        """Take out the half computed request, unless there is none or it is more urgent than
        `priority`.

        It is younger than all running requests.
        """
        req = self.half_computed
        return self._queue.popleft() if req and priority_of(req) >= priority else None

    def plan(self, budget: int, num_running: int, *, may_admit: bool) -> list[ReqSlice]:
        """Take prompts, or the first chunk of one, up to `budget` tokens.

        A request whose last chunk is planned leaves the queue.

        Args:
            num_running: requests that may each need another page soon; so many pages are left.
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
        """Whether this step computes much of its prompt for another one; the next can reuse it."""
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
    """Leading tokens of a request that it can take from the cache once a chunk is computed.

    Only a prompt's last chunk counts: a prefix is published when all of it is launched.
    """
    if not chunk.samples or req.namespace != chunk.req.namespace:
        return 0
    known = req.tokens[: req.num_known]
    return common_prefix_length(known, chunk.req.tokens[: chunk.end]) - chunk.start
