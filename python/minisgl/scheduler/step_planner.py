"""What a step computes: slices of running requests, then those of prompts within a budget.

    plan ─┬─ launched ─────────── commit
          └─ the memory is full ─ rollback ─ end_least_urgent_of

Decides when a running request is retracted, and when no request is admitted. `decode.py` and
`prefill.py` plan the slices, `pacing/pacer.py` finds the budget, `prefix_groups.py` the groups.
Knows nothing of the device, nor how far the step before it has come.
"""

from __future__ import annotations

from minisgl.core import BatchPlan
from minisgl.errors import OutOfMemory
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.decode import DecodeManager, RunningPlan
from minisgl.scheduler.events import Events, StepPlanned
from minisgl.scheduler.io import OtherRanks
from minisgl.scheduler.live_requests import LiveRequests
from minisgl.scheduler.pacing.pacer import StepPacer
from minisgl.scheduler.prefill import PrefillManager
from minisgl.scheduler.prefix_groups import group_by_prefix
from minisgl.scheduler.step_digest import StepDigests
from minisgl.scheduler.table import TableManager


class StepPlanner:
    """Plans steps. All ranks make equal plans, or the group ends.

    Args:
        max_prefill_length: tokens of prompts, and tokens of running requests beyond their first, of
            a step.
        kv_bytes: of a token's keys and values in a layer, as in `EngineLimits`.
        other_ranks: the ranks with which each plan is compared; None if there are none.
    """

    def __init__(
        self,
        *,
        table: TableManager,
        cache: CacheManager,
        prefill: PrefillManager,
        decode: DecodeManager,
        requests: LiveRequests,
        pacer: StepPacer,
        events: Events,
        max_prefill_length: int,
        kv_bytes: int,
        other_ranks: OtherRanks | None,
    ) -> None:
        self._table = table
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._requests = requests
        self._pacer = pacer
        self._events = events
        self._max_prefill_length = max_prefill_length
        self._kv_bytes = kv_bytes
        self._other_ranks = other_ranks
        self._digests = StepDigests()

    def plan(self, number: int) -> BatchPlan | None:
        """Plan slices of running requests, and of prompts within the budget; None if none.

        This changes state: it retracts and admits requests, publishes prefixes, and drains the
        tables' writes. So each plan must be launched or rolled back.

        Args:
            number: of the step.
        """
        running = self._decode.plan(self._max_prefill_length)
        if running.is_short_of_pages and not self._requests.has_deferred:  # else pages come soon
            running.drop(self._requests.retract())
        running_slices = running.slices
        budget = self._pacer.budget(running_slices, self._prefill.first)
        # Admit no request while a running one lacks pages: it would take what the retraction frees,
        # and be retracted in turn.
        chunks = self._prefill.plan(
            min(budget.num_tokens, running.budget_left),
            num_running=len(self._decode),
            may_admit=not running.is_short_of_pages,
        )
        slices = running_slices + chunks
        if not slices:
            self._compare(number, None, running)
            return None
        prefixes = self._cache.shared_prefixes()
        groups = group_by_prefix(running.decodes, prefixes, self._kv_bytes) if prefixes else []
        plan = BatchPlan(slices, self._table.drain_writes(), groups)
        self._compare(number, plan, running)
        if self._events.step_planned:
            self._events.step_planned.emit(StepPlanned(number, len(slices), plan.num_tokens))
        return plan

    def _compare(self, number: int, plan: BatchPlan | None, running: RunningPlan) -> None:
        """Compare a plan with the other ranks'.

        Args:
            running: the part of it that is about running requests.
        """
        if self._other_ranks:
            history = self._decode.history
            self._other_ranks.compare(self._digests.next(number, plan, running, history))

    def commit(self) -> None:
        """Keep the last plan, which was launched."""
        self._table.commit()
        self._prefill.commit()

    def rollback(self) -> None:
        """Undo the last plan, whose step was not launched.

        Running requests keep the pages that they got for it, whose writes are done with the next
        plan.
        """
        self._table.rollback()
        self._prefill.rollback()

    def end_least_urgent_of(self, plan: BatchPlan) -> None:
        """End one request of a plan that was rolled back, so that the others need less memory.

        That is the least urgent prompt of the plan or, without prompts, the least urgent running
        request. If one of these has ended since, they need less memory already.
        """
        reqs = {req_slice.req for req_slice in plan.slices}
        victim = self._prefill.least_urgent_of(reqs)
        if victim is None and all(req.finish is None for req in reqs):
            victim = self._decode.least_urgent_of(reqs)
        if victim is not None:
            self._requests.fail(victim, OutOfMemory())
