"""The device's memory is full in a step: one request of it ends, all others lose nothing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from minisgl.config import SCHEDULE_NAMES
from minisgl.core import SamplingParams
from minisgl.errors import StepOutOfMemory
from minisgl.message import StepDigestMsg
from minisgl.scheduler.events import RequestAdmitted
from minisgl.scheduler.pacing.costs import StepCosts, StepWork
from tests.scheduler.fake_executor import reference_answer
from tests.scheduler.full_memory import MOMENTS, FullMemory, Moment
from tests.scheduler.harness import Host, exactly, make_limits
from tests.scheduler.test_events import listen
from tests.scheduler.test_random_steps import RandomClient
from tests.scheduler.timed import TimedHost, TimedStep

PROMPT = list(range(2, 14))
moments = pytest.mark.parametrize("moment", MOMENTS)
overlaps = pytest.mark.parametrize("overlap", [True, False])


def make_host(**options: object) -> tuple[Host, FullMemory]:
    host = Host(executor_type=FullMemory, **options)
    assert isinstance(host.executor, FullMemory)
    return host, host.executor


def assert_ended_by_full_memory(host: Host, uid: int) -> None:
    error = host.answer(uid).error
    assert error is not None
    assert (error.status, error.code) == (503, "out_of_memory")


@moments
@overlaps
def test_the_newest_prompt_ends_and_the_others_are_answered(moment: Moment, overlap: bool) -> None:
    host, executor = make_host(overlap=overlap)
    running = host.submit([3, 4, 5], exactly(30))
    host.step(3)
    older = host.submit(PROMPT, exactly(5))
    newest = host.submit([*PROMPT, 7, 7], exactly(5))
    executor.fails_at = moment
    host.drain()

    [failed] = executor.failed
    assert [uid for uid, *_ in failed] == [running, older, newest]
    assert_ended_by_full_memory(host, newest)
    assert host.answer(running).error is None
    assert host.answer(older).error is None
    assert host.answer(older).num_cached == 0
    host.check_answers()


@moments
@overlaps
def test_without_prompts_the_youngest_running_request_ends(moment: Moment, overlap: bool) -> None:
    host, executor = make_host(overlap=overlap)
    uids = [host.submit([n, n, 5], exactly(30)) for n in range(2, 5)]
    host.step(3)
    executor.fails_at = moment
    host.drain()

    assert_ended_by_full_memory(host, uids[-1])
    assert [host.answer(uid).error for uid in uids[:-1]] == [None, None]
    assert len(host.answer(uids[-1]).tokens) > 0
    host.check_answers()


@moments
def test_of_several_priorities_the_least_urgent_prompt_ends(moment: Moment) -> None:
    host, executor = make_host()
    least_urgent = host.submit(PROMPT, exactly(5, priority=2))
    newest = host.submit([9, 9, 9], exactly(5))
    executor.fails_at = moment
    host.drain()

    assert_ended_by_full_memory(host, least_urgent)
    assert host.answer(newest).error is None


@moments
def test_a_failed_step_publishes_no_prefix(moment: Moment) -> None:
    host, executor = make_host()
    host.submit(PROMPT, exactly(1))
    executor.fails_at = moment
    host.drain()

    assert host.scheduler.cache.num_available == host.limits.num_pages
    assert len(host.free_pages) == host.limits.num_pages, "a page is in the tree"
    assert host.ask(PROMPT, exactly(3)).num_cached == 0


@moments
@overlaps
def test_the_second_half_of_a_prompt_fails_while_the_first_is_in_flight(
    moment: Moment, overlap: bool
) -> None:
    host, executor = make_host(overlap=overlap, max_prefill_length=16)
    long = host.submit([n % 20 + 2 for n in range(40)], exactly(5))
    host.step()
    newest = host.submit([*PROMPT[:4]], exactly(5))
    executor.fails_at = moment
    host.drain()

    assert {uid for uid, *_ in executor.failed[0]} == {long, newest}
    assert_ended_by_full_memory(host, newest)
    assert host.answer(long).error is None
    starts = [start for plan in executor.plans for uid, start, *_ in plan if uid == long]
    assert starts == sorted(set(starts)), "something is computed twice"
    lengths = [sum(end - start for _, start, end, _ in plan) for plan in executor.plans]
    assert max(lengths) <= 16
    host.check_answers()


def test_what_a_failed_step_would_have_cached_is_not_counted_as_cached() -> None:
    host, executor = make_host(max_prefill_length=64, schedule="short-first")
    longest = host.submit([7] * 60, exactly(2))
    longer = host.submit([*PROMPT, 3, 3, 3, 3], exactly(2))
    newest = host.submit(PROMPT, exactly(2))  # the shortest, so it is computed before the longer
    executor.fails_at = "after writes"
    host.drain()

    failed = {uid: start for uid, start, *_ in executor.failed[0]}
    assert failed == {longest: 0, newest: 0, longer: len(PROMPT)}
    assert_ended_by_full_memory(host, newest)
    assert host.answer(longer).num_cached == 0
    host.check_answers()


@moments
@overlaps
def test_an_admission_that_is_undone_is_no_event_and_is_not_counted(
    moment: Moment, overlap: bool
) -> None:
    host, executor = make_host(overlap=overlap)
    host.ask(PROMPT, exactly(3))
    heard = listen(host)
    counts = host.scheduler.statistics.counts
    num_cached_before = counts.num_cached_tokens
    older = host.submit([*PROMPT, 5, 5], exactly(3))
    newest = host.submit([9, 9, 9], exactly(3))
    executor.fails_at = moment
    host.drain()

    assert_ended_by_full_memory(host, newest)
    admissions = [event.uid for event in heard if isinstance(event, RequestAdmitted)]
    assert admissions == [older]
    num_cached = counts.num_cached_tokens - num_cached_before
    assert num_cached == host.answer(older).num_cached == 12


@moments
def test_a_request_that_the_step_before_has_ended_gets_its_end(moment: Moment) -> None:
    host, executor = make_host(overlap=True)
    prompt = next([n, n] for n in range(2, 30) if _ends_soon([n, n], host))
    tokens, _ = reference_answer(prompt, SamplingParams(), host.limits)
    uid = host.submit(prompt)
    other = host.submit([4, 4, 4], exactly(30))
    host.step(len(tokens))
    executor.fails_at = moment
    host.drain()

    assert {uid for uid, *_ in executor.failed[0]} == {other, uid}
    assert host.answer(uid).error is None
    assert host.answer(uid).finish == "stop"
    assert host.answer(other).error is None, "the step is smaller already"
    host.check_answers()


def _ends_soon(prompt: list[int], host: Host) -> bool:
    tokens, finish = reference_answer(prompt, SamplingParams(), host.limits)
    return finish == "stop" and 2 < len(tokens) < 20


def test_requests_end_one_after_the_other_until_the_step_fits() -> None:
    host, executor = make_host()
    uids = [host.submit([n, *PROMPT], exactly(5)) for n in range(2, 6)]
    for _ in range(3):
        executor.fails_at = "after writes"
        host.step()
    host.drain()

    assert [host.answer(uid).error is None for uid in uids] == [True, False, False, False]
    host.check_answers()


@moments
@overlaps
def test_tokens_of_a_failed_step_have_passed_nobody(moment: Moment, overlap: bool) -> None:
    host, executor = make_host(overlap=overlap, max_prefill_length=16)
    host.submit([n % 20 + 2 for n in range(40)], exactly(5))
    host.step()
    first = host.scheduler.prefill.first
    newest = host.submit(PROMPT[:4], exactly(5))
    executor.fails_at = moment
    host.step()

    assert len(executor.failed) == 1
    assert_ended_by_full_memory(host, newest)
    assert host.scheduler.prefill.first == first


@overlaps
def test_the_time_of_a_failed_step_counts_as_that_of_no_other(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """With overlap the second step fails, beside the first; without, the first one fails."""
    costs = StepCosts(step=0.01, token=1e-4)
    host = TimedHost(costs, noise=0.0, overlap=overlap)
    launch = host.executor.launch
    fails = iter([False, True] if overlap else [True])

    def launch_or_fail(prepared: TimedStep) -> TimedStep:
        if next(fails, False):
            host.clock.now += 1000
            raise StepOutOfMemory("after a long time")
        return launch(prepared)

    monkeypatch.setattr(host.executor, "launch", launch_or_fail)
    for _ in range(2):
        host.submit(1, 100, 30)
    host.run()

    assert host.clock.now > 1000
    assert len(host.costs) > 0
    decode = StepWork(num_tokens=0, num_attended=0, num_decodes=1, num_context=100)
    prompt = replace(decode, num_tokens=200, num_decodes=0, num_context=0)
    for work in (decode, prompt):
        assert max(each.seconds(work) for each in host.costs) < 2 * costs.seconds(work)


class OtherRanks:
    def compare(self, digest: StepDigestMsg) -> None:
        pass


def test_with_other_ranks_it_ends_the_group() -> None:
    host, executor = make_host()
    host.scheduler._other_ranks = OtherRanks()
    host.submit(PROMPT)
    executor.fails_at = "before writes"
    with pytest.raises(StepOutOfMemory):
        host.scheduler.step()


@overlaps
@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("max_prefill_length", [7, 64])
def test_random_steps_fail_and_nothing_else_changes(
    overlap: bool, cache: str, page_size: int, max_prefill_length: int
) -> None:
    num_failed = 0
    for seed in range(6):
        random = Random(f"{overlap} {cache} {page_size} {max_prefill_length} {seed}")
        max_seq_len = random.choice([9, 24, 40, 64])
        num_pages = -(-max_seq_len // page_size) + random.choice([0, 0, 1, 2, 5, 100])
        host, executor = make_host(
            limits=make_limits(num_pages, page_size, max_seq_len),
            num_rows=random.choice([1, 3, 5, 16]),
            asynchronous=random.random() < 0.7,
            overlap=overlap,
            cache=cache,
            schedule=SCHEDULE_NAMES[seed % len(SCHEDULE_NAMES)],
            max_prefill_length=max_prefill_length,
        )
        client = RandomClient(host, random)
        for _ in range(80):
            client.act()
            executor.fails_at = random.choice(MOMENTS) if random.random() < 0.15 else None
            if host.is_busy:
                host.step()
        executor.fails_at = None
        host.drain()
        host.check_answers()
        errors = [host.answer(uid).error for uid in host.asked]
        codes = [error.code for error in errors if error]
        assert codes.count("out_of_memory") <= len(executor.failed)
        num_failed += len(executor.failed)
        for uid in host.asked:
            error = host.answer(uid).error
            is_out_of_memory = error is not None and error.code == "out_of_memory"
            if not is_out_of_memory:
                assert (error is not None) == (uid in client.refused), f"uid {uid}: {error}"
            if host.answer(uid).finish == "abort":
                assert uid in client.aborted
    assert num_failed > 10
