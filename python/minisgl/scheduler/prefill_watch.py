"""Rank 0's clock: how long a request takes from its admission to its first output.

The time goes to the API process with that output, for /metrics and traces. No decision depends on
it.
"""

from __future__ import annotations

from minisgl.scheduler.events import Events, RequestAdmitted, RequestFinished, StepPlanned
from minisgl.scheduler.pacing.watch import Clock


class PrefillWatch:
    """Keeps the time at which each request was first admitted, until it ends.

    That is the time at which its first step was planned: the event `RequestAdmitted` comes after
    the launch, in which a CPU computes the step.
    """

    def __init__(self, events: Events, clock: Clock) -> None:
        self._clock = clock
        self._planned_at = 0.0
        self._admitted_at: dict[int, float] = {}
        events.step_planned.append(self._note_plan)
        events.request_admitted.append(self._begin)
        events.request_finished.append(self._forget)

    def _note_plan(self, _event: StepPlanned) -> None:
        self._planned_at = self._clock()

    def _begin(self, event: RequestAdmitted) -> None:
        self._admitted_at.setdefault(event.uid, self._planned_at)

    def _forget(self, event: RequestFinished) -> None:
        self._admitted_at.pop(event.uid, None)

    def seconds(self, uid: int) -> float | None:
        """Since a request was first admitted; None if it was not."""
        admitted_at = self._admitted_at.get(uid)
        return None if admitted_at is None else self._clock() - admitted_at
