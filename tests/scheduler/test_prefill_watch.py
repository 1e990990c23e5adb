"""How long prefills take, as the first message of each request says."""

from __future__ import annotations

import pytest

from minisgl.message import DetokenizeMsg, EngineStats
from minisgl.scheduler.events import Events, RequestAdmitted, StepPlanned
from minisgl.scheduler.pacing.costs import StepCosts
from minisgl.scheduler.prefill_watch import PrefillWatch
from tests.scheduler.full_memory import FullMemory
from tests.scheduler.harness import Host, exactly
from tests.scheduler.timed import TimedHost, TimedStep, VirtualClock

STEP_S = 0.5


class RecordingHost(TimedHost):
    """A scheduler of which each step takes half a second. Keeps its messages."""

    def __init__(self, **options: object) -> None:
        super().__init__(StepCosts(step=STEP_S), noise=0.0, target_itl_ms=0, **options)
        self.messages: list[DetokenizeMsg] = []

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        super().send(msgs, stats)
        self.messages += msgs

    def prefill_times(self, uid: int) -> list[float | None]:
        return [msg.prefill_s for msg in self.messages if msg.uid == uid]


def test_the_first_message_says_how_long_its_chunks_took_and_the_others_nothing() -> None:
    host = RecordingHost(overlap=False, max_prefill_length=100)
    host.submit(0, 250, 3)
    host.run()
    assert host.prefill_times(0) == [3 * STEP_S, None, None]


def test_waiting_is_no_part_of_it() -> None:
    host = RecordingHost(overlap=False, max_running_requests=1, max_prefill_length=100)
    host.submit(0, 100, 4)
    host.submit(0, 100, 1)
    host.run()
    assert host.prefill_times(1) == [pytest.approx(STEP_S)]


def test_what_a_launch_takes_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes its steps while they are launched."""
    host = RecordingHost(overlap=False, max_prefill_length=100)
    launch = host.executor.launch

    def launch_late(prepared: TimedStep) -> TimedStep:
        host.clock.now += 3.0
        return launch(prepared)

    monkeypatch.setattr(host.executor, "launch", launch_late)
    host.submit(0, 200, 1)
    host.run()
    assert host.prefill_times(0) == [pytest.approx(2 * (3.0 + STEP_S))]


def test_after_a_retraction_the_first_admission_counts() -> None:
    events = Events()
    clock = VirtualClock()
    watch = PrefillWatch(events, clock)
    for admitted_at in (1.0, 4.0):
        clock.now = admitted_at
        events.step_planned.emit(StepPlanned(0, num_requests=1, num_tokens=5))
        events.request_admitted.emit(RequestAdmitted(7, num_tokens=5, num_cached=0))
    clock.now = 6.0
    assert watch.seconds(7) == 5.0


def test_a_request_is_forgotten_at_its_end_however_it_ends() -> None:
    host = Host(executor_type=FullMemory)
    uids = [host.submit([n, n, 5], exactly(5)) for n in range(2, 5)]
    finished, aborted, failed = uids
    host.step(2)
    watch = host.scheduler.outputs._prefill_watch
    assert watch is not None
    assert None not in [watch.seconds(uid) for uid in uids]

    host.abort(aborted)
    assert isinstance(host.executor, FullMemory)
    host.executor.fails_at = "prepare"
    host.drain()
    assert host.answer(finished).finish == "length"
    assert host.answer(failed).error is not None
    assert [watch.seconds(uid) for uid in uids] == [None, None, None]
