"""Requests whose prompt is not computed yet: admission, and chunked prefill.

Chunking follows Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310): a prompt is computed in
chunks that fit the step's token budget, beside the decodes of that step. Several prompts can be
partly computed. Which of them a step computes is decided by the schedule:

    fcfs         by priority, then first come, first served
    short-first  by priority; then one half of the budget as in fcfs, and the other half to the
                 prompts that have the fewest tokens left to compute

So a short prompt does not wait behind a long one. The long one has at least half of each step as
long as it is first by arrival. It therefore waits at most twice as long as with fcfs
(docs/decisions/0016).

Admission takes the pages of a whole prompt. A partly computed prompt therefore needs nothing that
another one holds, and can always go on. If the request whose turn it is does not fit, no other is
admitted in that step: the others would take all pages that become free. For the same reason none
passes a request that was retracted, until that one is computed. Else younger ones would take its
pages again and again, and its work would be lost each time.

A prompt is published when its last chunk is planned. A request that is planned after it in the same
step finds the prefix in the cache, and may read it: in each layer, the keys and values of all
slices are written before any slice attends. So what several prompts have in common is computed
once, and none waits for another. There is one exception: a partly computed prompt does not look for
a longer prefix again. It computes what another prompt has published meanwhile a second time.

Owns the queue. Knows nothing of decodes or of time; pages come from `CacheManager`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

from minisgl.core import Req, ReqSlice
from minisgl.kvcache import BaseCacheHandle
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.events import Events, RequestAdmitted
from minisgl.scheduler.request_queue import (
    SCHEDULES,
    Order,
    PromptProgress,
    RequestQueue,
    by_arrival,
)
from minisgl.scheduler.table import TableManager

# Prompts that pass older ones are admitted only while fewer than these are partly computed, without
# those that are less urgent: each holds pages for its whole length.
MAX_PARTLY_COMPUTED = 8


class _Publication(msgspec.Struct, frozen=True):
    """The prompt of a last chunk was published.

    Attributes:
        prefix: what the request had before, as `CacheManager.publish` returned it.
    """

    prompt: PromptProgress
    prefix: BaseCacheHandle


@dataclass(slots=True)
class _PlannedChunks:
    """The chunks that one step computes.

    Attributes:
        num_running: running requests; each may need another page soon.
        may_admit: whether requests may still be admitted: not after one for which there was no
            page.
        by_uid: each prompt with its chunk so far.
        num_complete: of these, prompts that have their last chunk. The others are partly computed.
        changes: what was done for them, in order: the prompt of a `PromptProgress` was admitted, or
            one was published.
    """

    num_running: int = 0
    may_admit: bool = False
    by_uid: dict[int, tuple[PromptProgress, ReqSlice]] = field(default_factory=dict)
    num_complete: int = 0
    changes: list[PromptProgress | _Publication] = field(default_factory=list)


class FirstPrompt(msgspec.Struct, frozen=True):
    """How far the first prompt `by_arrival` has come, and how long it has waited.

    The `StepPacer` reads it: a step may take longer when many others have passed this prompt. The
    wait is counted in tokens, as ranks have no common clock.

    Attributes:
        position: where its next chunk starts, or that of another prompt which gets a share of the
            step, whichever is further. Until a prompt is admitted this is an estimate: how many of
            its tokens were in the prefix cache when it was queued.
        num_tokens: its tokens that were computed since it was queued, plus those that are left.
        num_passed: tokens of other prompts that were computed since it was queued.
    """

    position: int
    num_tokens: int
    num_passed: int


class PrefillManager:
    """The requests that wait, and those whose prompt is partly computed.

    A partly computed request holds a row, and pages for all its tokens.
    """

    def __init__(
        self, cache: CacheManager, table: TableManager, events: Events, schedule: str
    ) -> None:
        self._cache = cache
        self._table = table
        self._events = events
        self._orders = SCHEDULES[schedule]
        self._queue = RequestQueue([by_arrival, *self._orders])  # `first` asks for it in any case
        self._partly_computed: dict[int, PromptProgress] = {}
        self._planned = _PlannedChunks()
        self._num_prefilled = 0  # tokens of all prompts, so far
        self._last_number = 0
        self._first_number = 0

    @property
    def num_waiting(self) -> int:
        """How many requests wait to be admitted."""
        return len(self._queue)

    @property
    def partly_computed(self) -> list[Req]:
        return [prompt.req for prompt in self._partly_computed.values()]

    @property
    def first(self) -> FirstPrompt | None:
        """The first prompt by arrival, partly computed or waiting; None if there is none."""
        prompt = self._first_of(by_arrival)
        if prompt is None:
            return None
        with_a_share = filter(None, map(self._first_of, self._orders))
        num_done = prompt.num_done
        return FirstPrompt(
            position=max(each.req.num_tokens - each.num_left for each in with_a_share),
            num_tokens=num_done + prompt.num_left,
            num_passed=self._num_prefilled - prompt.num_prefilled_before - num_done,
        )

    def _first_of(self, order: Order) -> PromptProgress | None:
        """The first prompt of an order, partly computed or waiting; None if there is none."""
        candidates = [*self._partly_computed.values()]
        waiting = self._queue.first(order)
        if waiting:
            candidates.append(waiting)
        return min(candidates, key=order, default=None)

    def add(self, req: Req) -> None:
        """Queue a new request, behind all others of its priority."""
        self._last_number += 1
        req.queue_number = self._last_number
        self._enqueue(req, was_retracted=False)

    def put_back(self, req: Req) -> None:
        """Queue a retracted request by its number; its answer so far is part of its prompt now."""
        self._enqueue(req, was_retracted=True)

    def _enqueue(self, req: Req, *, was_retracted: bool) -> None:
        assert req.row is None
        num_left = self._cache.num_uncached(req)
        prompt = PromptProgress(req, num_left, self._num_prefilled, was_retracted=was_retracted)
        self._queue.add(prompt)

    def number_first(self, req: Req) -> None:
        """Give a request that is not here a number before those of all others."""
        self._first_number -= 1
        req.queue_number = self._first_number

    def remove(self, req: Req) -> None:
        """Forget a request that has ended. It need not be here."""
        self._partly_computed.pop(req.uid, None)
        self._queue.discard(req)

    def retract(self, priority: int) -> Req | None:
        """Remove and return the least urgent partly computed request, the youngest among equals.

        Among requests of equal priority it is retracted before those that run, because no client
        reads its answer yet. With short prompts first it may be the older one.

        Args:
            priority: of the least urgent running request.

        Returns:
            None if there is none, or if it is more urgent than that.
        """
        prompt = _least_urgent(self._partly_computed.values())
        if prompt is None or prompt.req.priority < priority:
            return None
        del self._partly_computed[prompt.req.uid]
        return prompt.req

    def plan(self, budget: int, num_running: int, *, may_admit: bool) -> list[ReqSlice]:
        """Plan prompt slices of together at most `budget` tokens.

        Args:
            num_running: running requests. Admission leaves a page over for each of them, which it
                may need soon.
            may_admit: whether requests may be admitted that are not partly computed.
        """
        self._planned = _PlannedChunks(num_running, may_admit)
        budget_left = 0
        for order, share in self._shares(budget):
            budget_left += share
            while budget_left > 0:
                prompt = self._next(order)
                if prompt is None:
                    break
                budget_left -= self._extend_chunk(prompt, budget_left)
        return [chunk for _, chunk in self._planned.by_uid.values()]

    def _shares(self, budget: int) -> list[tuple[Order, int]]:
        """The tokens of a step that each order gives out. The next has what the first leaves."""
        first, *others = self._orders
        share = budget // len(self._orders)
        shares_of_others = [(order, share) for order in others]
        return [(first, budget - share * len(others)), *shares_of_others]

    def _next(self, order: Order) -> PromptProgress | None:
        """The admitted prompt whose turn it is; one that waits is admitted if it is first."""
        partly_computed = min(self._partly_computed.values(), key=order, default=None)
        waiting = self._first_waiting(order) if self._may_admit(order) else None
        if waiting is None or (partly_computed and order(partly_computed) < order(waiting)):
            return partly_computed
        if self._try_admit(waiting):
            return waiting
        self._planned.may_admit = False
        return partly_computed

    def _may_admit(self, order: Order) -> bool:
        """Whether the first of an order that waits may be admitted, if it passes none."""
        waiting = self._queue.first(order)
        if waiting is None or not (self._planned.may_admit and self._table.has_free):
            return False
        if order is by_arrival:
            return True
        priorities = [prompt.req.priority for prompt in self._partly_computed.values()]
        num_rivals = sum(priority <= waiting.req.priority for priority in priorities)
        return num_rivals < MAX_PARTLY_COMPUTED

    def _first_waiting(self, order: Order) -> PromptProgress | None:
        """The prompt that is admitted next, but none that passes one that was retracted."""
        candidates = (self._queue.first(each) for each in (order, by_arrival))
        return next((prompt for prompt in candidates if not self._passes_retracted(prompt)), None)

    def _passes_retracted(self, waiting: PromptProgress | None) -> bool:
        """Whether a prompt before this one has lost its pages, which this one might take again."""
        if waiting is None:
            return False
        others = [*self._partly_computed.values()]
        oldest_waiting = self._queue.first(by_arrival)
        if oldest_waiting:
            others.append(oldest_waiting)
        key = by_arrival(waiting)
        return any(other.was_retracted and by_arrival(other) < key for other in others)

    def _try_admit(self, prompt: PromptProgress) -> bool:
        """Admit a request that waits; False, and nothing has changed, if there are no pages."""
        req = prompt.req
        chunks = self._planned
        num_others = chunks.num_running + chunks.num_complete + len(self._partly_computed)
        if not self._cache.try_admit(req, reserve=num_others):
            return False
        self._queue.discard(req)
        chunks.changes.append(prompt)
        prompt.num_left = req.num_tokens - req.num_computed
        return True

    def _extend_chunk(self, prompt: PromptProgress, budget: int) -> int:
        """Add tokens of an admitted request to its chunk; returns how many.

        A chunk may get tokens twice: its share of one order, then that of the next.
        """
        req = prompt.req
        num_added = min(prompt.num_left, budget)
        prompt.num_left -= num_added
        prompt.num_done += num_added
        self._num_prefilled += num_added
        is_last = prompt.num_left == 0
        end = req.num_tokens - prompt.num_left
        chunk = ReqSlice(req, req.num_computed, end, samples=is_last)
        self._planned.by_uid[req.uid] = (prompt, chunk)
        if is_last:
            self._complete(prompt)
        else:
            self._partly_computed[req.uid] = prompt
        return num_added

    def _complete(self, prompt: PromptProgress) -> None:
        """Publish a prompt whose last chunk is planned; it is no longer partly computed."""
        req = prompt.req
        prefix = self._cache.publish(req, req.num_tokens)
        self._planned.changes.append(_Publication(prompt, prefix))
        self._planned.num_complete += 1
        self._partly_computed.pop(req.uid, None)

    def commit(self) -> None:
        """Keep the last plan, which was launched."""
        chunks = self._planned
        self._planned = _PlannedChunks()
        if self._events.request_admitted:
            for change in chunks.changes:
                if isinstance(change, PromptProgress):
                    _, first_chunk = chunks.by_uid[change.req.uid]
                    self._emit_admitted(first_chunk)

    def _emit_admitted(self, first_chunk: ReqSlice) -> None:
        req = first_chunk.req
        event = RequestAdmitted(req.uid, req.num_tokens, num_cached=first_chunk.start)
        self._events.request_admitted.emit(event)

    def rollback(self) -> None:
        """Undo the last plan, whose step was not launched.

        Requests that were admitted for it wait again, with their numbers. Those that were partly
        computed still are. What was published is taken back, because it is not computed now.
        """
        chunks = self._planned
        self._planned = _PlannedChunks()
        for uid, (prompt, chunk) in chunks.by_uid.items():
            prompt.num_left += len(chunk)
            prompt.num_done -= len(chunk)
            self._num_prefilled -= len(chunk)
            self._partly_computed[uid] = prompt

        waiting: list[PromptProgress] = []
        for change in reversed(chunks.changes):
            if isinstance(change, _Publication):
                self._cache.unpublish(change.prompt.req, change.prefix)
            else:
                self._cache.release(change.req)
                del self._partly_computed[change.req.uid]
                waiting.append(change)
        for prompt in waiting:
            num_left = self._cache.num_uncached(prompt.req)
            self._queue.add(replace(prompt, num_left=num_left))

    def least_urgent_of(self, reqs: Collection[Req]) -> Req | None:
        """The least urgent of the requests that are here, the newest of equals; None if none is."""
        candidates = [self._partly_computed.get(req.uid) or self._queue.get(req) for req in reqs]
        prompt = _least_urgent([prompt for prompt in candidates if prompt])
        return prompt.req if prompt else None


def _least_urgent(prompts: Collection[PromptProgress]) -> PromptProgress | None:
    """The last one by arrival, of any state; None if there is none."""
    return max(prompts, key=by_arrival, default=None)
