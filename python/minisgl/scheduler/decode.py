"""Running requests: those whose prompt has its last chunk launched.

A request gets pages as its answer grows, not for all of `max_tokens` at the start. So more requests
run than would fit if all of them reached `max_tokens`. When pages run short, the least urgent
request is retracted (vLLM: preempted); among equally urgent ones the youngest, which began to run
last. Its pages are released as soon as no launched step refers to it. Later its KV is computed
again from its tokens.

A running request has one token to compute, or several if forced tokens were appended to it.

Owns the set of running requests. Knows nothing of prompts or grammars.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from minisgl.core import Req, ReqSlice
from minisgl.scheduler.cache import CacheManager


@dataclass(slots=True)
class RunningPlan:
    """The part of a plan that computes running requests.

    Attributes:
        budget_left: tokens of the budget that are left.
        decodes: slices of one token that sample, the longest contexts first: a kernel that gives
            each request to one multiprocessor should begin with the longest.
        longer: slices of requests that have several tokens to compute.
        idle: uids of requests that compute nothing in this step.
        is_short_of_pages: whether a request got no page, and so waits for the next step.
    """

    budget_left: int
    decodes: list[ReqSlice] = field(default_factory=list)
    longer: list[ReqSlice] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    is_short_of_pages: bool = False

    def add_longer(self, req: Req) -> None:
        """Add one token of a request, and as many more as the budget allows."""
        end = min(req.num_tokens, req.num_computed + 1 + self.budget_left)
        self.longer.append(ReqSlice(req, req.num_computed, end, samples=end == req.num_tokens))
        self.budget_left -= end - req.num_computed - 1

    def drop(self, req: Req) -> None:
        """Remove the slice of a request, if it has one."""
        self.decodes = [req_slice for req_slice in self.decodes if req_slice.req is not req]
        self.longer = [req_slice for req_slice in self.longer if req_slice.req is not req]

    @property
    def slices(self) -> list[ReqSlice]:
        return self.decodes + self.longer


class DecodeManager:
    """The running requests, in the order in which they began to run: oldest first.

    Attributes:
        history: a hash of which requests were added and removed, in order. Ranks with equal
            histories and equal prompt slices run the same requests, equally far.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._running: dict[int, Req] = {}
        self.history = 0

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, req: Req) -> bool:
        return req.uid in self._running

    @property
    def running(self) -> list[Req]:
        return list(self._running.values())

    def add(self, req: Req) -> None:
        self._running[req.uid] = req
        self._note(req, runs=True)

    def remove(self, req: Req) -> None:
        del self._running[req.uid]
        self._note(req, runs=False)

    def _note(self, req: Req, *, runs: bool) -> None:
        self.history = hash((self.history, runs, req.uid))  # of integers: equal in all processes

    def plan(self, budget: int) -> RunningPlan:
        """Plan at least one token of each running request that is not full and has a page for it.

        Args:
            budget: tokens that requests may compute beyond their first one, together.
        """
        plan = RunningPlan(budget)
        try_extend = self._cache.try_extend
        for req in self._running.values():
            if req.is_full:
                plan.idle.append(req.uid)
            elif not try_extend(req):
                plan.is_short_of_pages = True
                plan.idle.append(req.uid)
            elif req.num_tokens == req.num_computed + 1:
                decode = ReqSlice(req, req.num_computed, req.num_tokens, samples=True)
                plan.decodes.append(decode)
            else:
                plan.add_longer(req)
        plan.decodes.sort(key=attrgetter("end"), reverse=True)
        return plan

    @property
    def least_urgent(self) -> Req:
        """The least urgent request; there must be one."""
        return _least_urgent(reversed(self._running.values()))

    def least_urgent_of(self, reqs: Collection[Req]) -> Req:
        """The least urgent of some requests that run."""
        return _least_urgent(req for req in reversed(self._running.values()) if req in reqs)

    def retract(self) -> Req:
        """Remove and return the least urgent request, whose pages can then go to the others."""
        victim = self.least_urgent
        self.remove(victim)
        return victim


def _least_urgent(youngest_first: Iterable[Req]) -> Req:
    """The request of the largest priority; among equals the youngest, which began to run last."""
    return max(youngest_first, key=attrgetter("priority"))
