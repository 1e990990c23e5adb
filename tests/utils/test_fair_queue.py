"""The order of jobs that wait: short ones pass long ones, and long ones are not passed for ever."""

from __future__ import annotations

import weakref

from minisgl.utils.fair_queue import FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]


def test_jobs_of_equal_cost_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    names = [f"job {i}" for i in range(50)]
    for name in names:
        queue.put(name, 10, flow=name)
    assert drained(queue) == names


def test_a_short_job_passes_long_ones_that_came_before() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("long 1", "long 2"):
        queue.put(name, 1000, flow=name)
    queue.put("short", 10, flow="short")
    assert drained(queue) == ["short", "long 1", "long 2"]


def test_many_jobs_of_one_flow_take_turns_with_a_job_of_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(10):
        queue.put(f"one of many {i}", 10, flow="many")
    assert queue.take() == "one of many 0"
    queue.put("alone", 10, flow="alone")
    assert drained(queue)[:2] == ["one of many 1", "alone"]


def test_a_long_job_waits_for_as_much_later_work_as_it_takes_itself() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("long", 1000, flow="long")
    num_short = 0
    queue.put("short", 10, flow=0)
    while queue.take() != "long":
        num_short += 1
        assert num_short <= 100
        queue.put("short", 10, flow=num_short)
    assert num_short >= 99


class Flow:
    """One of which can be seen whether anything still has it."""


def test_nothing_of_a_flow_is_kept_after_its_last_job() -> None:
    queue: FairQueue[str] = FairQueue()
    flow = Flow()
    kept = weakref.ref(flow)
    names = [f"job {i}" for i in range(3)]
    for name in names:
        queue.put(name, 10, flow)
    del flow
    assert drained(queue) == names
    assert kept() is None
