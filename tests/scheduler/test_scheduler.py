"""The scheduler by example: who is refused, aborted, delayed, retracted, and what they are told."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from minisgl.core import IntArray, Req, SamplingParams, TableWrites
from minisgl.kvcache import radix_cache
from minisgl.kvcache.radix_cache import common_prefix_length
from minisgl.message import ExitMsg, FlushCacheMsg, NewDetokenizerMsg
from minisgl.scheduler import live_requests, prefill
from minisgl.scheduler.request_queue import (
    Order,
    PromptProgress,
    RequestQueue,
    by_arrival,
    by_length,
)
from tests.scheduler.fake_executor import endless_answer, reference_answer
from tests.scheduler.harness import EOS, VOCAB_SIZE, Host, exactly, make_limits

OVERLAP = pytest.mark.parametrize("overlap", [True, False])


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [(2 + salt + i * (i + salt)) % VOCAB_SIZE for i in range(num_tokens)]


def prompt_that_stops(num_answer: int) -> list[int]:
    """A prompt whose answer ends with an end-of-sequence token, after num_answer tokens."""
    for salt in range(1000):
        prompt = prompt_of(5, salt)
        tokens, finish = reference_answer(prompt, SamplingParams(), make_limits())
        if finish == "stop" and len(tokens) == num_answer:
            return prompt
    raise AssertionError("no such prompt")


# --- requests that cannot be served


@pytest.mark.parametrize(
    ("prompt", "params", "code", "message"),
    [
        (
            prompt_of(65),
            SamplingParams(),
            "context_length_exceeded",
            "maximum context length is 64 tokens",
        ),
        (prompt_of(64), SamplingParams(), "context_length_exceeded", "requested 65 tokens"),
        (
            prompt_of(60),
            SamplingParams(min_tokens=5),
            "context_length_exceeded",
            "60 in the messages, 5 in the completion, by min_tokens",
        ),
        (
            prompt_of(60),
            exactly(5),
            "context_length_exceeded",
            "60 in the messages, 5 in the completion",
        ),
        (
            prompt_of(65),
            SamplingParams(max_tokens=0),
            "context_length_exceeded",
            "requested 65 tokens",
        ),
        ([], SamplingParams(), "invalid_value", "the prompt is empty"),
        (
            [2, VOCAB_SIZE, 3],
            SamplingParams(),
            "invalid_value",
            rf"token id {VOCAB_SIZE} is outside \[0, {VOCAB_SIZE}",
        ),
        ([2, -7], SamplingParams(), "invalid_value", "token id -7"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(
    prompt: list[int], params: SamplingParams, code: str, message: str
) -> None:
    host = Host()
    other = host.submit(prompt_of(5), exactly(3))
    uid = host.submit(prompt, params)
    host.step()

    error = host.answer(uid).error
    assert error is not None
    assert (error.status, error.code) == (400, code)
    assert re.search(message, error.message)
    host.drain()
    assert len(host.answer(other).tokens) == 3


def test_each_flush_is_answered_also_one_before_any_request() -> None:
    host = Host()
    for uid in range(3):
        host.inbox.msgs.append(FlushCacheMsg(uid))
        host.step()
    answered = [flush for stats in host.stats for flush in stats.flushes]
    assert answered == [(0, 0), (1, 0), (2, 0)]


def test_what_could_never_fit_into_the_pool_is_refused() -> None:
    host = Host(make_limits(num_pages=4, page_size=4, max_seq_len=1000))
    uid = host.submit(prompt_of(10), exactly(7))
    host.step()

    error = host.answer(uid).error
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert error.message.endswith(" The KV cache bounds it: 4 pages (--num-pages) of 4 tokens.")


def test_what_the_context_cannot_hold_is_refused_without_a_word_of_the_pool() -> None:
    host = Host(make_limits(num_pages=4, page_size=4, max_seq_len=16))
    uid = host.submit(prompt_of(10), exactly(7))
    host.step()

    error = host.answer(uid).error
    assert error is not None
    assert "--num-pages" not in error.message


@OVERLAP
def test_what_fills_the_whole_pool_runs(overlap: bool) -> None:
    host = Host(make_limits(num_pages=4, page_size=4), overlap=overlap)
    host.ask(prompt_of(9, salt=1), exactly(3))

    assert len(host.ask(prompt_of(9), exactly(7)).tokens) == 7
    assert len(host.ask(prompt_of(15), SamplingParams()).tokens) == 1


# --- the end of a request


@OVERLAP
@pytest.mark.parametrize("embeds", [True, False])
def test_a_prompt_that_wants_no_answer_may_fill_the_context(overlap: bool, embeds: bool) -> None:
    host = Host(make_limits(num_pages=64, page_size=4, max_seq_len=64), overlap=overlap)
    params = SamplingParams(max_tokens=0, embeds=embeds)
    uids = [host.submit(prompt_of(64, salt), params) for salt in range(2)]
    host.drain()
    host.check_answers()

    assert [host.answer(uid).finish for uid in uids] == ["length", "length"]


@OVERLAP
def test_an_answer_goes_on_to_the_end_of_the_context_without_max_tokens(overlap: bool) -> None:
    host = Host(overlap=overlap)
    answer = host.ask(prompt_of(10), SamplingParams(ignore_eos=True))

    assert (len(answer.tokens), answer.finish) == (54, "length")
    assert answer.tokens == endless_answer(prompt_of(10), 64, VOCAB_SIZE)[10:]


@OVERLAP
@pytest.mark.parametrize("num_answer", [1, 2, 5])
def test_nothing_is_delivered_after_an_end_of_sequence_token(
    overlap: bool, num_answer: int
) -> None:
    host = Host(overlap=overlap)
    answer = host.ask(prompt_that_stops(num_answer))

    assert (len(answer.tokens), answer.finish) == (num_answer, "stop")
    assert answer.tokens[-1] in EOS


def test_overlap_launches_a_step_too_many_and_drops_its_token() -> None:
    host = Host(overlap=True)
    host.ask(prompt_that_stops(3))

    assert sum(len(plan) for plan in host.executor.plans) == 4


def test_no_step_too_many_is_launched_where_the_length_is_known() -> None:
    host = Host(overlap=True)
    host.ask(prompt_of(5), exactly(3))

    assert sum(len(plan) for plan in host.executor.plans) == 3


def test_an_ignored_end_of_sequence_token_is_delivered_like_any_other() -> None:
    prompt = prompt_that_stops(3)
    answer = Host().ask(prompt, exactly(10))

    assert answer.tokens[2] in EOS
    assert len(answer.tokens) == 10


def test_overlap_launches_the_next_batch_before_it_takes_the_tokens_of_the_last() -> None:
    host = Host(overlap=True)
    uid = host.submit(prompt_of(5), exactly(5))
    host.step()
    assert (len(host.executor.plans), host.answer(uid).tokens) == (1, [])

    host.step()
    assert (len(host.executor.plans), len(host.answer(uid).tokens)) == (2, 1)


def test_without_overlap_a_step_gives_its_token() -> None:
    host = Host(overlap=False)
    uid = host.submit(prompt_of(5), exactly(5))
    host.step(3)

    assert len(host.answer(uid).tokens) == 3


def test_an_exit_message_ends_the_loop() -> None:
    host = Host()
    host.inbox.msgs.append(ExitMsg())
    host.scheduler.run()

    assert not host.scheduler.is_running


# --- abort


@OVERLAP
@pytest.mark.parametrize("num_steps", range(8))
def test_a_request_may_be_aborted_at_any_moment(overlap: bool, num_steps: int) -> None:
    """Waiting, half prefilled, in flight, running, and when it is over."""
    host = Host(overlap=overlap, max_prefill_length=4)
    other = host.submit(prompt_of(3, salt=1), exactly(10))
    uid = host.submit(prompt_of(10), exactly(3))
    host.step(num_steps)
    host.abort(uid)
    host.abort(uid)
    host.drain()
    host.check_answers()

    assert len(host.answer(other).tokens) == 10
    assert host.answer(uid).finish == ("abort" if num_steps < 6 + overlap else "length")


@pytest.mark.parametrize(("num_steps", "num_prompt"), [(0, 0), (1, 10), (2, 10)])
def test_an_abort_has_the_prompts_length_once_some_of_it_was_computed(
    num_steps: int, num_prompt: int
) -> None:
    """The prompt then counts for its key, although no token came."""
    host = Host(max_prefill_length=4)
    uid = host.submit(prompt_of(10), exactly(3))
    host.step(num_steps)
    host.abort(uid)
    host.drain()
    answer = host.answer(uid)
    assert (answer.finish, answer.tokens) == ("abort", [])
    assert answer.num_prompt == num_prompt


def test_a_refusal_does_not_count_the_prompt() -> None:
    host = Host()
    answer = host.ask(prompt_of(host.limits.max_seq_len + 1))
    assert answer.error is not None
    assert answer.num_prompt == 0


def test_an_abort_is_answered_in_the_step_that_takes_it_in() -> None:
    host = Host(num_rows=1)
    running = host.submit(prompt_of(5), exactly(20))
    waiting = host.submit(prompt_of(6), exactly(20))
    host.step(2)
    host.abort(running)
    host.abort(waiting)
    host.step()

    assert host.answer(running).finish == host.answer(waiting).finish == "abort"


def test_aborting_the_unknown_the_finished_and_the_refused_changes_nothing() -> None:
    host = Host()
    finished = host.submit(prompt_of(5), exactly(2))
    refused = host.submit([])
    host.drain()
    running = host.submit(prompt_of(6), exactly(5))
    for uid in (finished, refused, 10**9, -1):
        host.abort(uid)
    host.drain()

    assert len(host.answer(running).tokens) == 5
    assert host.answer(10**9).finish is None


def test_an_abort_makes_room_for_the_next() -> None:
    host = Host(num_rows=1)
    running = host.submit(prompt_of(5), exactly(50))
    waiting = host.submit(prompt_of(6), exactly(2))
    host.step(5)
    host.abort(running)
    host.step(4)

    assert host.answer(waiting).finish == "length"


class ComparedReq(Req):
    """A request that counts how often it is compared with another one."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedReq.num_compared += 1
        return self is other

    __hash__ = None  # type: ignore[assignment]


def test_the_abort_of_one_that_waits_does_not_look_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_requests, "Req", ComparedReq)
    monkeypatch.setattr(ComparedReq, "num_compared", 0)
    host = Host(num_rows=1)
    running = host.submit(prompt_of(4), exactly(50))
    uids = [host.submit(prompt_of(4, salt), exactly(5)) for salt in range(300)]
    host.step()
    for uid in uids[::-1][:-1]:
        host.abort(uid)
    host.step()

    assert all(isinstance(req, ComparedReq) for req in host.scheduler.requests._live.values())
    assert ComparedReq.num_compared == 0
    assert host.scheduler.prefill.num_waiting == 1
    host.drain()
    assert [host.answer(uid).finish for uid in (running, uids[0], uids[7])] == [
        "length",
        "length",
        "abort",
    ]


def test_a_queue_whose_requests_leave_does_not_keep_their_places() -> None:
    def progress_of(uid: int, priority: int, number: int, num_left: int) -> PromptProgress:
        req = Req(uid, np.zeros(1, dtype=np.int32), SamplingParams(priority=priority), 2, 0)
        req.queue_number = number
        return PromptProgress(req, num_left)

    def drain(queue: RequestQueue, order: Order) -> list[int]:
        uids = []
        while entry := queue.first(order):
            queue.discard(entry.req)
            uids.append(entry.req.uid)
        return uids

    def queue_of_ten() -> RequestQueue:
        queue = RequestQueue([by_arrival, by_length])
        entries = [progress_of(uid, uid % 3, uid, num_left=9 - uid) for uid in range(1000)]
        for entry in entries:
            queue.add(entry)
        for entry in entries[10:]:
            queue.discard(entry.req)
        queue.discard(entries[0].req)
        queue.add(progress_of(2000, priority=1, number=-1, num_left=5))
        return queue

    queue = queue_of_ten()
    assert len(queue) == 10
    assert all(len(heap) < 100 for heap in queue._heaps.values())
    assert drain(queue, by_arrival) == [3, 6, 9, 2000, 1, 4, 7, 2, 5, 8]
    assert drain(queue_of_ten(), by_length) == [9, 6, 3, 7, 2000, 4, 1, 8, 5, 2]
    assert len(queue) == 0


# --- prefixes


@OVERLAP
def test_a_second_identical_request_computes_its_last_page_only(overlap: bool) -> None:
    host = Host(make_limits(page_size=4), overlap=overlap)
    first = host.ask(prompt_of(12), exactly(2))
    second = host.ask(prompt_of(12), exactly(2))

    assert (first.num_cached, second.num_cached) == (0, 8)
    assert first.tokens == second.tokens
    assert [plan[0][1:3] for plan in host.executor.plans][2] == (8, 12)


def test_the_next_turn_finds_the_answer_of_the_turn_before() -> None:
    host = Host(make_limits(page_size=4))
    answer = host.ask(prompt_of(10), exactly(7))

    assert host.ask(prompt_of(10) + answer.tokens + [5, 6, 7], exactly(2)).num_cached == 16


def test_a_prompt_is_published_while_its_request_still_runs() -> None:
    host = Host(make_limits(page_size=4))
    host.submit(prompt_of(12), exactly(30))
    host.step(2)
    second = host.submit(prompt_of(12), exactly(2))
    host.drain()

    assert host.answer(second).num_cached == 8


def test_nothing_is_found_in_a_naive_cache() -> None:
    host = Host(cache="naive")

    assert [host.ask(prompt_of(12), exactly(2)).num_cached for _ in range(2)] == [0, 0]


@OVERLAP
def test_identical_prompts_of_one_step_do_not_touch_each_others_pages(overlap: bool) -> None:
    host = Host(make_limits(num_pages=32, page_size=4), overlap=overlap)
    uids = [host.submit(prompt_of(13), exactly(n)) for n in (3, 9, 6)]
    host.step(2)
    pages = [page for holding in host.scheduler.cache._held.values() for page in holding.own]
    assert len(pages) == len(set(pages))

    host.drain()
    host.check_answers()
    assert [len(host.answer(uid).tokens) for uid in uids] == [3, 9, 6]


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_a_prefix_that_a_step_computes_is_not_computed_twice_in_it(cache: str) -> None:
    host = Host(make_limits(num_pages=600, page_size=4, max_seq_len=800), cache=cache)
    prefix = prompt_of(400)
    uids = [host.submit(prefix + prompt_of(10, salt), exactly(3)) for salt in range(4)]
    host.step()

    started = {uid: end - start for uid, start, end, _ in host.executor.plans[0]}
    if cache == "radix":
        assert started == {uids[0]: 410, **dict.fromkeys(uids[1:], 10)}
    else:
        assert started == dict.fromkeys(uids, 410)
    host.drain()
    host.check_answers()


@OVERLAP
def test_prompts_that_stand_twice_in_the_queue_hold_up_nobody(overlap: bool) -> None:
    limits = make_limits(num_pages=6000, page_size=4, max_seq_len=400)
    host = Host(limits, num_rows=128, overlap=overlap, max_prefill_length=300 * 16)
    for salt in range(64):
        for _ in range(2):
            host.submit([salt % VOCAB_SIZE, salt // VOCAB_SIZE, *prompt_of(290)], exactly(3))
    host.step(4)

    assert host.scheduler.prefill.num_waiting == 0
    assert not host.scheduler.prefill.partly_computed
    host.drain()
    host.check_answers()


def test_a_plan_of_many_prompts_compares_no_prompt_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_compared = 0

    def counting(tokens: IntArray, others: IntArray) -> int:
        nonlocal num_compared
        num_compared += 1
        return common_prefix_length(tokens, others)

    for module in (radix_cache, prefill):
        monkeypatch.setattr(module, "common_prefix_length", counting, raising=False)
    limits = make_limits(num_pages=1000, page_size=4)
    host = Host(limits, num_rows=200, max_prefill_length=10_000)
    for i in range(200):
        host.submit([i % VOCAB_SIZE, i // VOCAB_SIZE, *prompt_of(5)], exactly(1))
    host.step()

    assert len(host.executor.plans[0]) == 200
    assert num_compared <= 2 * 200
    host.drain()


def test_a_cached_prefix_is_sent_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither each request that has it, nor each token of it, is counted again."""
    host = Host(make_limits(num_pages=600, page_size=4, max_seq_len=800))
    prefix = prompt_of(400)
    host.ask(prefix, exactly(1))
    num_sent: list[int] = []
    write_tables = host.executor._write_tables

    def counting(writes: TableWrites) -> None:
        num_sent.append(len(writes.pages) + len(writes.tokens))
        write_tables(writes)

    monkeypatch.setattr(host.executor, "_write_tables", counting)
    for salt in range(8):
        host.submit(prefix + prompt_of(8, salt), exactly(3))
    host.step()

    assert num_sent == [400 + 100 + 8 * (8 + 2)]
    host.drain()
    host.check_answers()


@OVERLAP
def test_a_salt_keeps_cached_prefixes_apart(overlap: bool) -> None:
    host = Host(make_limits(page_size=4), overlap=overlap)
    salts = [None, "a", "b", "a", None, "b"]
    answers = [host.ask(prompt_of(12), replace(exactly(2), cache_salt=salt)) for salt in salts]

    assert [answer.num_cached for answer in answers] == [0, 0, 0, 8, 8, 8]
    host.check_answers()


def test_a_prompt_does_not_use_what_the_same_step_computes_in_another_namespace() -> None:
    host = Host(make_limits(num_pages=600, page_size=4, max_seq_len=800))
    for salt in ("a", "b", None, "a"):
        host.submit(prompt_of(400), replace(exactly(3), cache_salt=salt))
    host.step()
    assert [end - start for _, start, end, _ in host.executor.plans[0]] == [400, 400, 400, 4]
    host.drain()
    host.check_answers()


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    host = Host(make_limits(num_pages=600, page_size=4, max_seq_len=800))
    uids = [host.submit(prompt_of(400), replace(exactly(1), prompt_logprobs=0)) for _ in range(3)]
    host.step()
    assert [(uid, start) for uid, start, *_ in host.executor.plans[0]] == [(uid, 0) for uid in uids]
    host.drain()
    host.check_answers()


@OVERLAP
def test_a_scored_prompt_that_is_retracted_between_two_chunks_has_each_score_once(
    overlap: bool,
) -> None:
    host = Host(make_limits(num_pages=6, page_size=4), overlap=overlap, max_prefill_length=1)
    host.submit(prompt_of(4), exactly(20))
    host.step(5)
    scored = host.submit(prompt_of(12, salt=1), replace(exactly(2), prompt_logprobs=0))
    host.drain()

    assert was_retracted(host, scored)
    assert host.stats[-1].num_retractions == 1
    host.check_answers()


# --- fairness


@OVERLAP
@pytest.mark.parametrize("max_prefill_length", [1, 7])
def test_a_running_request_gets_a_token_in_every_step_of_a_long_prefill(
    overlap: bool, max_prefill_length: int
) -> None:
    host = Host(overlap=overlap, max_prefill_length=max_prefill_length)
    running = host.submit(prompt_of(2), exactly(60))
    host.step(4)
    long = host.submit(prompt_of(45, salt=3), exactly(2))
    for _ in range(44 // max_prefill_length):
        before = len(host.answer(running).tokens)
        host.step()
        assert len(host.answer(running).tokens) == before + 1
        assert not host.answer(long).tokens
    host.drain()
    assert len(host.answer(long).tokens) == 2


@pytest.mark.parametrize("budget", [1, 7, 16, 1000])
def test_no_step_computes_more_prompt_tokens_than_allowed(budget: int) -> None:
    host = Host(max_prefill_length=budget)
    for salt in range(5):
        host.submit(prompt_of(20, salt), exactly(4))
    host.drain()

    prompts = [
        sum(end - start for _, start, end, _ in plan if end <= 20) for plan in host.executor.plans
    ]
    assert max(prompts) == min(budget, 100)


def test_first_come_first_served_admits_in_order_of_arrival() -> None:
    """Even where a later, shorter one would fit: it would be served first for ever."""
    limits = make_limits(num_pages=16, page_size=4)
    host = Host(limits, schedule="fcfs", max_prefill_length=1000)
    for num_tokens in (20, 40, 2, 30, 1, 50):
        host.submit(prompt_of(num_tokens, salt=num_tokens), exactly(4))
    host.drain()
    host.check_answers()

    first_steps = [uid for plan in host.executor.plans for uid, start, _, _ in plan if start == 0]
    assert first_steps == sorted(first_steps)


def test_no_more_requests_run_than_there_are_rows() -> None:
    host = Host(num_rows=2)
    for salt in range(6):
        host.submit(prompt_of(5, salt), exactly(5))
    host.drain()
    host.check_answers()

    assert max(len(plan) for plan in host.executor.plans) == 2


def test_the_longest_decodes_are_first_in_a_plan() -> None:
    """Whatever the order in which they began to run."""
    host = Host()
    for salt, num_tokens in enumerate([3, 20, 9, 14]):
        host.submit(prompt_of(num_tokens, salt), exactly(5))
    host.step(2)

    assert [end for _, _, end, _ in host.executor.plans[-1]] == [21, 15, 10, 4]


# --- priority


def admissions(host: Host) -> list[int]:
    """Who began to be computed, in order; without hits, who lost its pages is there again."""
    return [uid for plan in host.executor.plans for uid, start, _, _ in plan if start == 0]


def test_the_smallest_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    host = Host(num_rows=1, cache="naive")
    for salt, priority in enumerate([0, 7, 0, -3, 0, 7, -3]):
        host.submit(prompt_of(5, salt), exactly(3, priority))
    host.drain()
    host.check_answers()

    assert admissions(host) == [3, 6, 0, 2, 4, 1, 5]


@OVERLAP
def test_the_least_urgent_is_retracted_even_if_it_is_older(overlap: bool) -> None:
    host = Host(make_limits(num_pages=18, page_size=4), overlap=overlap, cache="naive")
    for salt, priority in enumerate([1, 1, 0, -1]):
        host.submit(prompt_of(4, salt), exactly(28, priority))
        host.step()
    host.drain()
    host.check_answers()

    assert was_retracted(host, 1)
    assert not was_retracted(host, 3)
    last_steps = {uid: i for i, plan in enumerate(host.executor.plans) for uid, *_ in plan}
    assert sorted(last_steps, key=last_steps.__getitem__) == [2, 3, 0, 1]


@OVERLAP
def test_an_urgent_prompt_is_not_retracted_partly_computed_for_others_that_run(
    overlap: bool,
) -> None:
    host = Host(
        make_limits(num_pages=10, page_size=4), overlap=overlap, max_prefill_length=1, cache="naive"
    )
    running = host.submit(prompt_of(4), exactly(30, priority=1))
    host.step(6)
    urgent = host.submit(prompt_of(20, salt=1), exactly(10))
    host.drain()
    host.check_answers()

    assert was_retracted(host, running)
    assert not was_retracted(host, urgent)


def test_a_retracted_request_goes_behind_a_more_urgent_one_that_waits() -> None:
    def order(priority: int) -> list[int]:
        host = Host(make_limits(num_pages=8, page_size=4), cache="naive", max_prefill_length=100)
        for salt in range(2):
            host.submit(prompt_of(4, salt), exactly(24, priority=1))
        host.step(10)
        host.submit(prompt_of(20, salt=9), exactly(4, priority))
        host.drain()
        host.check_answers()
        return admissions(host)

    assert order(priority=0) == [0, 1, 2, 1]
    assert order(priority=1) == [0, 1, 1, 2]


# --- memory pressure


def was_retracted(host: Host, *uids: int) -> bool:
    """Whether one of these (or any) computed a position twice.

    Without a cached prefix that means that it lost its pages.
    """
    wanted = uids or host.asked.keys()
    computed = [
        (uid, position)
        for plan in host.executor.plans
        for uid, start, end, _ in plan
        for position in range(start, end)
        if uid in wanted
    ]
    return len(computed) > len(set(computed))


@OVERLAP
@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_changes_no_token(overlap: bool, page_size: int) -> None:
    def tokens(num_pages: int) -> tuple[Host, list[list[int]]]:
        limits = make_limits(num_pages, page_size, max_seq_len=48)
        host = Host(limits, overlap=overlap, cache="naive", max_prefill_length=16)
        uids = [host.submit(prompt_of(4, salt), exactly(30)) for salt in range(6)]
        host.drain()
        host.check_answers()
        return host, [host.answer(uid).tokens for uid in uids]

    roomy, expected = tokens(600)
    tight, got = tokens(60 // page_size)

    assert not was_retracted(roomy)
    assert was_retracted(tight)
    assert got == expected


def test_more_requests_run_than_would_fit_with_all_they_may_ask_for() -> None:
    """Pages are given as tokens come: a large max_tokens costs nothing before it is used."""
    host = Host(make_limits(num_pages=20, page_size=4, max_seq_len=64))
    for salt in range(6):
        host.submit(prompt_of(4, salt), SamplingParams())
    host.step(2)

    assert len(host.executor.plans[-1]) == 6


def check_that_nobody_is_retracted(host: Host) -> None:
    host.drain()
    host.check_answers()
    assert host.stats[-1].num_retractions == 0


@OVERLAP
def test_admission_leaves_a_page_for_each_running_request(overlap: bool) -> None:
    host = Host(make_limits(num_pages=4, page_size=4), overlap=overlap, cache="naive")
    for salt in range(2):
        host.submit(prompt_of(3, salt), exactly(4))
    host.step()
    host.submit(prompt_of(3, salt=2), exactly(4))
    host.step()

    assert host.stats[-1].num_waiting == 1
    check_that_nobody_is_retracted(host)


@OVERLAP
def test_admission_leaves_a_page_for_each_prompt_of_the_same_step(overlap: bool) -> None:
    """The first prompt fills its page, and its answer begins with the next one."""
    host = Host(make_limits(num_pages=2, page_size=4), overlap=overlap, cache="naive")
    for salt in range(2):
        host.submit(prompt_of(4, salt), exactly(3))
    host.step()

    assert host.stats[-1].num_waiting == 1
    check_that_nobody_is_retracted(host)


@OVERLAP
def test_admission_leaves_a_page_for_a_partly_computed_prompt_without_a_chunk(
    overlap: bool,
) -> None:
    """Its two pages are full when its answer begins."""
    host = Host(
        make_limits(num_pages=4, page_size=4), overlap=overlap, max_prefill_length=4, cache="naive"
    )
    host.submit(prompt_of(8), exactly(3, priority=1))
    host.step()
    host.submit(prompt_of(6, salt=1), exactly(3))
    host.step()

    assert host.stats[-1].num_waiting == 1
    check_that_nobody_is_retracted(host)


@OVERLAP
def test_the_youngest_request_is_retracted_first(overlap: bool) -> None:
    host = Host(make_limits(num_pages=18, page_size=4), overlap=overlap, cache="naive")
    oldest, middle, youngest = (host.submit(prompt_of(4, salt), exactly(28)) for salt in range(3))
    host.drain()
    host.check_answers()

    assert was_retracted(host, youngest)
    assert not was_retracted(host, oldest)
    last_steps = {uid: i for i, plan in enumerate(host.executor.plans) for uid, *_ in plan}
    assert last_steps[oldest] <= last_steps[middle] < last_steps[youngest]


def test_nobody_is_retracted_while_an_ended_request_is_about_to_give_its_pages_back() -> None:
    host = Host(make_limits(num_pages=8, page_size=4), cache="naive")
    staying, leaving = (host.submit(prompt_of(4, salt), exactly(28)) for salt in range(2))
    host.step(13)
    assert host.scheduler.cache.num_available == 0
    host.abort(leaving)
    host.step()
    assert len(host.executor.plans) == 13, "the one that stays finds no page in this step"
    host.drain()

    assert not was_retracted(host, staying)


@OVERLAP
def test_the_oldest_request_is_not_retracted_for_a_younger_one(overlap: bool) -> None:
    """Its tokens come step by step to its end, whatever waits or runs beside it."""
    host = Host(
        make_limits(num_pages=10, page_size=4), overlap=overlap, max_prefill_length=1, cache="naive"
    )
    oldest = host.submit(prompt_of(4), exactly(30))
    host.step(3)
    for salt in range(1, 5):
        host.submit(prompt_of(20, salt), exactly(10))
    host.drain()
    host.check_answers()

    assert not was_retracted(host, oldest)


def test_a_retracted_request_goes_before_those_that_wait() -> None:
    host = Host(make_limits(num_pages=8, page_size=4), cache="naive", max_prefill_length=100)
    for salt in range(2):
        host.submit(prompt_of(4, salt), exactly(24))
    host.step(10)
    late = host.submit(prompt_of(20, salt=9), exactly(4))
    host.drain()
    host.check_answers()

    assert was_retracted(host)
    last_steps = {uid: i for i, plan in enumerate(host.executor.plans) for uid, *_ in plan}
    assert max(last_steps, key=last_steps.__getitem__) == late


def test_what_is_cached_is_evicted_before_anybody_is_retracted() -> None:
    host = Host(make_limits(num_pages=16, page_size=4))
    for salt in range(4):
        host.ask(prompt_of(12, salt), exactly(4))
    host.executor.plans.clear()
    for salt in range(4, 6):
        host.submit(prompt_of(8, salt), exactly(20))
    host.drain()

    assert not was_retracted(host)


def test_a_hit_at_the_first_admission_is_what_is_reported() -> None:
    """A request that is retracted finds its own prefix again; that is no saving of the caller's."""
    host = Host(make_limits(num_pages=8, page_size=4))
    uids = [host.submit(prompt_of(5, salt), exactly(24)) for salt in range(2)]
    host.drain()

    restarts = [
        start for plan in host.executor.plans for _, start, end, _ in plan if end - start > 1
    ]
    assert restarts[:2] == [0, 0]
    assert restarts[2] > 0, "the second was retracted and found a part of itself"
    assert [host.answer(uid).num_cached for uid in uids] == [0, 0]


# --- what is said of how it stands


@OVERLAP
def test_what_is_said_last_is_how_it_stands_and_nothing_is_said_twice(overlap: bool) -> None:
    host = Host(make_limits(num_pages=16, page_size=4), num_rows=2, overlap=overlap)
    held = set()
    for salt in range(4):
        host.submit(prompt_of(9, salt), exactly(6))
    while host.is_busy:
        host.step()
        scheduler = host.scheduler
        last = host.stats[-1]
        num_partly_computed = len(scheduler.prefill.partly_computed)
        assert last.num_running == len(scheduler.decode) + num_partly_computed
        assert last.num_running + last.num_waiting == len(scheduler.requests._live)
        assert last.num_pages_used == 16 - scheduler.cache.num_available
        assert last.num_pages == 16
        held.add((last.num_running, last.num_waiting))
    assert {(2, 2), (0, 0)} <= held
    assert all(one != other for one, other in itertools.pairwise(host.stats))
    assert host.stats[-1].num_pages_used == host.stats[-1].num_retractions == 0


def test_a_partly_computed_prompt_counts_as_running() -> None:
    host = Host(max_prefill_length=4)
    host.submit(prompt_of(9), exactly(1))
    host.step()

    assert (host.stats[-1].num_running, host.stats[-1].num_waiting) == (1, 0)


def test_an_abort_that_leaves_nothing_to_say_still_tells_of_the_pages_that_came_back() -> None:
    host = Host(overlap=True)
    uid = host.submit(prompt_of(9), exactly(20))
    host.step(4)
    assert host.stats[-1].num_pages_used > 0
    host.abort(uid)
    host.drain()
    assert (host.stats[-1].num_running, host.stats[-1].num_pages_used) == (0, 0)


def test_a_new_detokenizer_gets_all_that_follows_and_how_it_stands() -> None:
    """What the one before it was told may be lost."""
    host = Host(overlap=True)
    host.ask(prompt_of(9), exactly(4))
    last = host.stats[-1]
    host.inbox.msgs.append(NewDetokenizerMsg(1))
    host.step()
    assert host.lives == [1]
    assert host.stats[-2:] == [last, last]


def test_retractions_are_counted() -> None:
    host = Host(make_limits(num_pages=8, page_size=4))
    for salt in range(3):
        host.submit(prompt_of(6, salt), exactly(20))
    host.drain()
    assert host.stats[-1].num_retractions > 0
    host.check_answers()
