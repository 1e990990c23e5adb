"""Requests whose prompt is not computed yet: admission by priority, then in order of arrival; and chunked prefill.

Chunking follows Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310): a prompt is computed in pieces that fit
the step's token budget, beside the decodes of the same step, so that a long prompt delays nobody by more than
one step. Only the request at the head can be half computed.

Owns the queue. Knows nothing of decoding; pages come from the cache manager.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque

from minisgl.core import Req, ReqSlice
from minisgl.kernel import common_prefix_length
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.table import TableManager

_WORTH_WAITING = 256  # tokens


def priority_of(req: Req) -> int:
    return req.params.priority


class PrefillManager:
    """First come, first served among equal priorities, the smallest first. Nobody is hurried for having waited long.

    A request that lost its pages goes back to the head of its equals.
    """

    def __init__(self, cache: CacheManager, table: TableManager) -> None:
        self._cache = cache
        self._table = table
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

        It comes before its equals, but nobody comes before one that is half computed: that one holds pages, and must go
        on to free them.
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
        """Take out the request that is half computed, if there is one, unless it is more urgent than `priority`.

        It is younger than all that run.
        """
        req = self.half_computed
        return self._queue.popleft() if req and priority_of(req) >= priority else None

    def plan(self, budget: int, num_running: int) -> list[ReqSlice]:
        """Take prompts, or the first part of one, up to `budget` tokens.

        A request whose last chunk is planned leaves the queue.

        Args:
            num_running: requests that may each want another page soon; so many are left for them.
        """
        slices: list[ReqSlice] = []
        while budget > 0 and self._queue:
            req = self._queue[0]
            if req.row is None and not self._try_admit(req, slices, num_running):
                break
            end = min(req.num_tokens, req.num_computed + budget)
            slices.append(ReqSlice(req, req.num_computed, end, samples=end == req.num_tokens))
            budget -= len(slices[-1])
            if end < req.num_tokens:
                break
            self._queue.popleft()
        return slices

    def _should_wait(self, req: Req, slices: list[ReqSlice]) -> bool:
        """Whether much of a prompt is computed in this step for another one; in the next step it can be shared."""
        if not self._cache.shares or req.scores_prompt:
            return False
        known = req.tokens[: req.num_known]
        return any(
            part.samples
            and common_prefix_length(known, part.req.tokens[: part.end]) - part.start
            >= _WORTH_WAITING
            for part in slices
        )

    def _try_admit(self, req: Req, slices: list[ReqSlice], num_running: int) -> bool:
        if not self._table.has_free or self._should_wait(req, slices):
            return False
        return self._cache.try_admit(req, reserve=num_running + len(slices))
