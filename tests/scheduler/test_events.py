"""Events: what is emitted, in which order, and that nothing is made without a listener."""

from __future__ import annotations

import logging

import pytest

from minisgl.scheduler import events as events_module
from minisgl.scheduler.events import (
    ChunkLaunched,
    Event,
    Events,
    FirstToken,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    StepFinished,
    StepLaunched,
    StepPlanned,
)
from tests.scheduler.harness import Host, exactly, make_limits
from tests.scheduler.test_scheduler import prompt_of

STEP_EVENTS = (StepPlanned, StepLaunched, StepFinished)


def listen(host: Host) -> list[Event]:
    heard: list[Event] = []
    host.scheduler.events.listen_to_all(heard.append)
    return heard


def way_of(heard: list[Event], uid: int) -> list[Event]:
    return [event for event in heard if getattr(event, "uid", None) == uid]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_can_be_followed_from_queue_to_end(overlap: bool) -> None:
    host = Host(make_limits(page_size=4), overlap=overlap, max_prefill_length=8)
    heard = listen(host)
    host.ask(prompt_of(13), exactly(3))
    uid = host.submit(prompt_of(13), exactly(3))
    host.drain()

    assert way_of(heard, 0) == [
        RequestQueued(0, num_prompt=13),
        RequestAdmitted(0, num_tokens=13, num_cached=0),
        ChunkLaunched(0, 0, 8),
        ChunkLaunched(0, 8, 13),
        FirstToken(0),
        RequestFinished(0, "length", num_output=3),
    ]
    assert way_of(heard, uid)[1:3] == [
        RequestAdmitted(uid, num_tokens=13, num_cached=12),
        ChunkLaunched(uid, 12, 13),
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_each_step_is_planned_launched_and_finished_once(overlap: bool) -> None:
    host = Host(overlap=overlap)
    heard = listen(host)
    for salt in range(3):
        host.submit(prompt_of(5, salt), exactly(4))
    host.drain()
    num_steps = len(host.executor.plans)

    for kind in STEP_EVENTS:
        assert [event.step for event in heard if isinstance(event, kind)] == list(range(num_steps))
    planned = [event for event in heard if isinstance(event, StepPlanned)]
    sizes = [
        (len(plan), sum(end - start for _, start, end, _ in plan)) for plan in host.executor.plans
    ]
    assert [(event.num_requests, event.num_tokens) for event in planned] == sizes
    assert sum(event.num_tokens for event in heard if isinstance(event, StepFinished)) == 12


def test_a_retracted_request_is_admitted_again() -> None:
    host = Host(make_limits(num_pages=8, page_size=4))
    heard = listen(host)
    for salt in range(3):
        host.submit(prompt_of(6, salt), exactly(20))
    host.drain()
    host.check_answers()

    retracted = [event.uid for event in heard if isinstance(event, RequestRetracted)]
    assert retracted
    for uid in range(3):
        admitted = [event for event in way_of(heard, uid) if isinstance(event, RequestAdmitted)]
        assert len(admitted) == 1 + retracted.count(uid)
        assert sum(isinstance(event, FirstToken) for event in way_of(heard, uid)) == 1


def test_an_abort_and_no_answer_are_ends_too() -> None:
    host = Host(num_rows=1)
    heard = listen(host)
    running = host.submit(prompt_of(5), exactly(20))
    waiting = host.submit(prompt_of(6), exactly(20))
    empty = host.submit(prompt_of(7), exactly(0))
    host.step(3)
    host.abort(running)
    host.abort(waiting)
    host.drain()

    assert way_of(heard, waiting) == [
        RequestQueued(waiting, 6),
        RequestFinished(waiting, "abort", 0),
    ]
    ends = [event for event in heard if isinstance(event, RequestFinished)]
    assert [(event.uid, event.finish) for event in ends] == [
        (running, "abort"),
        (waiting, "abort"),
        (empty, "length"),
    ]
    assert not any(event == FirstToken(empty) for event in heard)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_counted_is_what_was_launched(overlap: bool) -> None:
    """Every token of an admission is found in the cache or computed, over retractions as well."""
    host = Host(make_limits(num_pages=10, page_size=4), overlap=overlap, max_prefill_length=5)
    heard = listen(host)
    for salt in (0, 0, 1, 2, 0):
        host.submit(prompt_of(9, salt), exactly(20))
    host.drain()
    stats = host.stats[-1]

    assert stats.num_steps == len(host.executor.plans)
    assert stats.num_retractions > 0
    assert stats.num_cached_tokens > 0
    admitted = sum(event.num_tokens for event in heard if isinstance(event, RequestAdmitted))
    assert stats.num_computed_tokens + stats.num_cached_tokens <= admitted
    chunks = [event for event in heard if isinstance(event, ChunkLaunched)]
    assert stats.num_computed_tokens == sum(event.end - event.start for event in chunks)


def test_an_event_that_has_no_listener_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those are made that the counts and the watch of prefills need."""
    monkeypatch.setattr("minisgl.scheduler.scheduler.StepFinished", None)
    monkeypatch.setattr("minisgl.scheduler.live_requests.RequestQueued", None)
    monkeypatch.setattr("minisgl.scheduler.outputs.FirstToken", None)
    host = Host()
    host.submit(prompt_of(5), exactly(4))
    host.drain()
    host.check_answers()


def test_the_log_shows_a_requests_whole_way(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=events_module.__name__):
        host = Host()
        host.submit(prompt_of(5), exactly(2))
        host.drain()

    for text in (
        "RequestQueued(uid=0",
        "RequestAdmitted(uid=0",
        "ChunkLaunched(uid=0",
        "StepPlanned",
    ):
        assert text in caplog.text
    assert "RequestFinished(uid=0, finish='length', num_output=2)" in caplog.text


def test_nothing_listens_to_all_unless_debug_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=events_module.__name__):
        assert not Host().scheduler.events.step_finished


def test_listeners_hear_their_own_type() -> None:
    events = Events()
    heard: list[Event] = []
    events.first_token.append(heard.append)
    assert events.first_token
    assert not events.request_queued

    events.first_token.emit(FirstToken(3))
    assert heard == [FirstToken(3)]
