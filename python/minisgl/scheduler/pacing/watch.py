"""Rank 0's clock: measures how long steps take, and fits their costs.

Of the scheduler, only this module and `prefill_watch.py` read a clock. What is found here decides
nothing by itself: it is posted to rank 0's inbox as a `StepCostsMsg`, reaches all ranks with the
other messages of a step, and changes the plans of all of them from the same step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

from minisgl.core import BatchPlan
from minisgl.message import StepCostsMsg
from minisgl.scheduler.pacing.costs import StepCostFit, StepCosts, StepWork

Clock = Callable[[], float]

# Steps without prompts to each one that is measured: they are many, and alike.
_DECODE_STEPS = 8
# Costs are posted when they change the time of a step by this part.
_CHANGE = 0.05


class StepWatch:
    """Measures steps, and posts their costs when these have changed.

    The time of a step is the gap in running requests' streams: from the end of the step before it
    to its own end, when its tokens are on the host. With overlap that is the time of the device, or
    of the host if it is slower. After the scheduler was idle, it is the time since a message came.
    """

    def __init__(self, post: Callable[[StepCostsMsg], None], clock: Clock) -> None:
        self._post = post
        self._clock = clock
        self._fit = StepCostFit()
        self._posted = StepCosts()
        self._before = 0.0  # when the step before ended, or a message ended idleness
        self._measured: list[tuple[StepWork, float]] = []  # with seconds; not accounted for
        self._num_decode_steps = 0

    def resume(self) -> None:
        """Note that no step was computed until now: there was none, or it was rolled back."""
        self._before = self._clock()

    def begin(self, plan: BatchPlan) -> StepWork | None:
        """The work of a step; None if it is not measured."""
        if plan.num_decodes == len(plan.slices):
            self._num_decode_steps += 1
            if self._num_decode_steps % _DECODE_STEPS != 1:
                return None
        return StepWork.of(plan.slices)

    def end(self, work: StepWork | None) -> None:
        """Note the end of a step. Every step ends here, in the order of their launch."""
        now = self._clock()
        if work is not None:
            self._measured.append((work, now - self._before))
        self._before = now

    def learn(self) -> None:
        """Account for what was measured. Called when the tokens are on their way: it takes time."""
        for work, seconds in self._measured:
            self._fit.observe(work, seconds)
            costs = self._fit.costs
            expected = costs.seconds(work)
            if abs(expected - self._posted.seconds(work)) > _CHANGE * expected:
                self._posted = costs
                self._post(StepCostsMsg(astuple(costs)))
        self._measured.clear()
