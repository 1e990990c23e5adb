"""A fake executor whose memory is full at some steps, at different moments of them."""

from __future__ import annotations

from typing import Any, Literal

from minisgl.core import BatchPlan
from minisgl.errors import StepOutOfMemory
from tests.scheduler.fake_executor import FakeExecutor, FakeStep

# When memory is full: while a step is prepared, before its table writes, after them, or when some
# of its slices have written their KV.
Moment = Literal["prepare", "before writes", "after writes", "partly computed"]
MOMENTS: tuple[Moment, ...] = ("prepare", "before writes", "after writes", "partly computed")


class FullMemory(FakeExecutor):
    """Fails at the next step if `fails_at` is set, which it clears.

    Attributes:
        failed: the slices of each failed step, as in `plans`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fails_at: Moment | None = None
        self.failed: list[list[tuple[int, int, int, bool]]] = []

    def prepare(self, plan: BatchPlan) -> FakeStep:
        prepared = super().prepare(plan)
        self._fail_at("prepare", plan)
        return prepared

    def launch(self, prepared: FakeStep) -> FakeStep:
        plan = prepared.plan
        if self._newest:
            self._newest.compute()
        self._fail_at("before writes", plan)
        if self.fails_at:
            self._write_tables(plan.writes)
            self._fail_at("after writes", plan)
            for req_slice in plan.slices[: 1 + len(plan.slices) // 2]:
                self._store(self._remember(req_slice))
            self._fail_at("partly computed", plan)
        return super().launch(prepared)

    def _fail_at(self, moment: Moment, plan: BatchPlan) -> None:
        if self.fails_at != moment:
            return
        self.fails_at = None
        self.failed.append(
            [(each.req.uid, each.start, each.end, each.samples) for each in plan.slices]
        )
        raise StepOutOfMemory(moment)
