"""In which order prompts are computed: short ones first, and no long one waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import SCHEDULE_NAMES
from minisgl.core import Req
from minisgl.engine import EngineLimits
from minisgl.scheduler.prefill import MAX_PARTLY_COMPUTED, PrefillManager
from minisgl.scheduler.request_queue import SCHEDULES, PromptProgress
from tests.scheduler.harness import VOCAB_SIZE, Host, exactly, make_limits

LIMITS = make_limits(num_pages=4000, page_size=4, max_seq_len=1000)
SMALL_LIMITS = make_limits(num_pages=500, page_size=4, max_seq_len=104)


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [(2 + salt + i * (i + salt)) % VOCAB_SIZE for i in range(num_tokens)]


def test_each_schedule_has_a_name_among_the_options() -> None:
    assert {*SCHEDULES} == {*SCHEDULE_NAMES}


def roomy_host(budget: int, schedule: str = "short-first", limits: EngineLimits = LIMITS) -> Host:
    """Memory for all; nothing is found in the cache."""
    return Host(
        limits,
        num_rows=64,
        schedule=schedule,
        max_prefill_length=budget,
        overlap=False,
        cache="naive",
    )


def order_of_ends(host: Host) -> list[int]:
    """The requests in the order in which their prompts were computed to the end."""
    return [
        uid
        for plan in host.executor.plans
        for uid, _, end, _ in plan
        if end == len(host.asked[uid][0])
    ]


def order_of_starts(host: Host) -> list[int]:
    """The requests in the order in which their prompts were begun, once for each time."""
    return [uid for plan in host.executor.plans for uid, start, _, _ in plan if start == 0]


# --- examples


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    host = roomy_host(budget=40)
    long = host.submit(prompt_of(400), exactly(2))
    host.step(2)
    short = host.submit(prompt_of(20, salt=1), exactly(2))
    host.step()

    assert len(host.answer(short).tokens) == 1
    assert (long, 80, 100, False) in host.executor.plans[-1], "the long one has its half"
    host.drain()
    host.check_answers()


def test_first_come_first_served_is_there_for_comparison() -> None:
    host = roomy_host(budget=40, schedule="fcfs")
    long = host.submit(prompt_of(400), exactly(1))
    short = host.submit(prompt_of(20, salt=1), exactly(1))
    host.drain()

    assert order_of_ends(host) == [long, short]


def by_latest(prompt: PromptProgress) -> tuple[int, ...]:
    return (prompt.req.priority, -prompt.req.queue_number)


def test_a_schedule_need_not_have_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pacer asks for the first by arrival in any case."""
    monkeypatch.setitem(SCHEDULES, "fcfs", [by_latest])
    host = roomy_host(budget=40, schedule="fcfs")
    uids = [host.submit(prompt_of(100, salt), exactly(1)) for salt in range(3)]
    host.drain()

    assert order_of_ends(host) == uids[::-1]
    host.check_answers()


def test_what_short_prompts_leave_over_goes_to_the_long_one() -> None:
    host = roomy_host(budget=40)
    long = host.submit(prompt_of(400), exactly(1))
    short = host.submit(prompt_of(5, salt=1), exactly(1))
    host.step()

    assert sorted(host.executor.plans[0]) == [(long, 0, 35, False), (short, 0, 5, True)]


def test_the_shortest_is_first_and_equals_come_in_order_of_arrival() -> None:
    host = roomy_host(budget=20)
    lengths = [400, 90, 30, 60, 30]
    for salt, num_tokens in enumerate(lengths):
        host.submit(prompt_of(num_tokens, salt), exactly(1))
    host.drain()

    assert order_of_ends(host) == [2, 4, 3, 1, 0]


def test_what_is_left_to_compute_counts_and_not_what_is_cached() -> None:
    host = Host(LIMITS, max_prefill_length=40, overlap=False)
    host.ask(prompt_of(396), exactly(1))
    oldest = host.submit(prompt_of(300, salt=2), exactly(1))
    fresh = host.submit(prompt_of(60, salt=1), exactly(1))
    cached = host.submit([*prompt_of(396), *prompt_of(10, salt=3)], exactly(1))
    host.drain()

    assert order_of_ends(host)[1:] == [cached, fresh, oldest]


def test_an_urgent_prompt_overtakes_those_that_are_partly_computed() -> None:
    for schedule in SCHEDULE_NAMES:
        host = roomy_host(budget=10, schedule=schedule)
        late = host.submit(prompt_of(40), exactly(1, priority=1))
        host.step(2)
        urgent = host.submit(prompt_of(100, salt=1), exactly(1))
        host.drain()

        assert order_of_ends(host) == [urgent, late]


def test_the_number_of_partly_computed_prompts_is_bounded() -> None:
    host = roomy_host(budget=10)
    for salt in range(40):
        host.submit(prompt_of(500 - 12 * salt, salt), exactly(1))
        host.step()
        assert len(host.scheduler.prefill.partly_computed) <= MAX_PARTLY_COMPUTED + 1
    host.drain()
    host.check_answers()


def test_prompts_that_are_less_urgent_take_no_place_of_a_short_one() -> None:
    """Else it would wait for all of a long prompt of its priority."""
    host = roomy_host(budget=10)
    for salt in range(2 * MAX_PARTLY_COMPUTED):
        host.submit(prompt_of(500 - 12 * salt, salt), exactly(1, priority=1))
        host.step()
    assert len(host.scheduler.prefill.partly_computed) >= MAX_PARTLY_COMPUTED
    long = host.submit(prompt_of(900, salt=50), exactly(1))
    host.step()
    short = host.submit(prompt_of(5, salt=51), exactly(1))
    host.step()

    assert host.answer(short).is_final
    assert not host.answer(long).is_final
    host.drain()
    host.check_answers()


def test_where_memory_is_short_nobody_passes_the_oldest() -> None:
    """Short ones would else take every page that comes back."""
    host = Host(make_limits(num_pages=16, page_size=4), max_prefill_length=1000, cache="naive")
    host.submit(prompt_of(30), exactly(4))
    long = host.submit(prompt_of(40, salt=1), exactly(1))
    shorts = [host.submit(prompt_of(2, salt), exactly(1)) for salt in range(2, 8)]
    host.drain()
    host.check_answers()

    first_steps = order_of_starts(host)
    assert first_steps.index(long) == 1
    assert sorted(first_steps[2:]) == shorts


@pytest.mark.parametrize("overlap", [True, False])
def test_a_partly_computed_prompt_that_is_retracted_keeps_its_place(overlap: bool) -> None:
    host = Host(
        make_limits(num_pages=14, page_size=4),
        overlap=overlap,
        max_prefill_length=2,
        cache="naive",
    )
    host.submit(prompt_of(2), exactly(30))
    host.step(4)
    older = host.submit(prompt_of(16, salt=1), exactly(1))
    host.step(2)
    younger = host.submit(prompt_of(12, salt=2), exactly(1))
    while younger not in [req.uid for req in host.scheduler.prefill.partly_computed]:
        host.step()
    host.drain()
    host.check_answers()

    started = order_of_starts(host)
    assert started.count(older) == 1, "the oldest is retracted last"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_short_prompt_that_is_retracted_partly_computed_comes_after_an_older_one_that_waits(
    overlap: bool,
) -> None:
    """It began before the older one, because it is shorter."""
    host = Host(
        make_limits(num_pages=16, page_size=4), overlap=overlap, max_prefill_length=2, cache="naive"
    )
    running = host.submit(prompt_of(4), exactly(40))
    host.step(2)
    oldest = host.submit(prompt_of(28, salt=1), exactly(1))
    older = host.submit(prompt_of(24, salt=2), exactly(1))
    short = host.submit(prompt_of(20, salt=3), exactly(1))
    host.drain()
    host.check_answers()

    started = order_of_starts(host)
    assert started == [running, oldest, short, older, short]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_running_request_that_is_retracted_comes_before_an_older_one_that_waits(
    overlap: bool,
) -> None:
    """It passed the older one, because it is shorter, and now has an answer to go on with."""
    host = Host(
        make_limits(num_pages=17, page_size=4), overlap=overlap, max_prefill_length=2, cache="naive"
    )
    running = host.submit(prompt_of(4), exactly(40))
    host.step(2)
    oldest = host.submit(prompt_of(28, salt=1), exactly(1))
    older = host.submit(prompt_of(24, salt=2), exactly(1))
    short = host.submit(prompt_of(4, salt=3), exactly(30))
    host.drain()
    host.check_answers()

    started = order_of_starts(host)
    assert started == [running, oldest, short, short, older]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_a_long_prompt_that_was_retracted_is_done_beside_endless_short_ones(
    overlap: bool, cache: str
) -> None:
    """Those that came after it would else take its pages again, each time before it is done."""
    host = Host(
        make_limits(num_pages=100, page_size=4, max_seq_len=400),
        num_rows=64,
        overlap=overlap,
        cache=cache,
        max_prefill_length=8,
    )
    retracted: list[int] = []
    host.scheduler.events.request_retracted.append(lambda event: retracted.append(event.uid))

    def submit_short(salt: int) -> None:
        host.submit(prompt_of(4, salt), exactly(60))
        host.step(3)

    for salt in range(4):
        submit_short(salt)
    long = host.submit(prompt_of(200, salt=4), exactly(1))
    for salt in range(5, 50):
        submit_short(salt)

    assert long in retracted
    assert host.answer(long).is_final
    host.drain()
    host.check_answers()


def test_who_is_retracted_is_before_all_others_each_time() -> None:
    """Two of them, and the first request that has arrived."""
    cache = MagicMock()
    cache.num_uncached.return_value = 1
    prefill = PrefillManager(cache, MagicMock(), MagicMock(), "fcfs")
    reqs = [Req(uid, [2, 3], exactly(1), max_length=9, seed=0) for uid in (1, 2, 3)]
    prefill.add(reqs[2])
    prefill.number_first(reqs[1])
    prefill.number_first(reqs[0])
    assert sorted(reqs, key=lambda req: req.queue_number) == reqs


def test_a_budget_of_one_token_goes_to_the_oldest_prompt_beside_endless_short_ones() -> None:
    host = roomy_host(budget=1)
    long = host.submit(prompt_of(20), exactly(1))
    for salt in range(1, 21):
        host.submit(prompt_of(1, salt), exactly(1))
        host.step()

    assert order_of_ends(host) == [long]


# --- properties


@dataclass(frozen=True)
class Arrival:
    num_steps_before: int
    num_tokens: int


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 3), st.one_of(st.integers(1, 9), st.integers(1, 100))),
    min_size=1,
    max_size=15,
)


@dataclass
class Wait:
    """How long a prompt waited, in computed tokens of prompts.

    Attributes:
        fcfs: until it would have been computed if nobody had passed it.
    """

    actual: int
    fcfs: int


def waits(host: Host, arrivals: list[Arrival]) -> list[Wait]:
    """Submit prompts, and find out how long each waited."""
    done_at: dict[int, int] = {}
    num_left: dict[int, int] = {}
    arrived_at: dict[int, int] = {}
    fcfs: dict[int, int] = {}
    clock = 0

    def step() -> None:
        nonlocal clock
        num_plans = len(host.executor.plans)
        host.step()
        ends = []
        for plan in host.executor.plans[num_plans:]:
            for uid, start, end, _ in plan:
                if uid in num_left:
                    clock += end - start
                    num_left[uid] -= end - start
                    ends += [uid] if num_left[uid] == 0 else []
        for uid in ends:
            del num_left[uid]
            done_at[uid] = clock

    for salt, arrival in enumerate(arrivals):
        for _ in range(arrival.num_steps_before):
            if host.is_busy:
                step()
        uid = host.submit(prompt_of(arrival.num_tokens, salt), exactly(1))
        num_left[uid] = arrival.num_tokens
        arrived_at[uid] = clock
        fcfs[uid] = sum(num_left.values())
    while host.is_busy:
        step()
    return [Wait(done_at[uid] - arrived_at[uid], fcfs[uid]) for uid in host.asked]


@settings(deadline=None, max_examples=60)
@given(ARRIVALS, st.sampled_from([2, 7, 20, 300]))
def test_no_prompt_waits_for_more_than_twice_as_long_as_in_order_of_arrival(
    arrivals: list[Arrival], budget: int
) -> None:
    for wait in waits(roomy_host(budget, limits=SMALL_LIMITS), arrivals):
        assert wait.actual <= 2 * wait.fcfs + budget


@settings(deadline=None, max_examples=20)
@given(ARRIVALS, st.sampled_from([7, 50]))
def test_in_order_of_arrival_nobody_passes(arrivals: list[Arrival], budget: int) -> None:
    for wait in waits(roomy_host(budget, "fcfs", SMALL_LIMITS), arrivals):
        assert wait.fcfs <= wait.actual < wait.fcfs + budget
