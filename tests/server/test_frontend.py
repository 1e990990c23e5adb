"""Open requests: each ends once, none stays open, and an abort follows its request."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import (
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
    RequestTimeout,
    SlowReader,
    Unavailable,
)
from minisgl.message import (
    AbortMsg,
    BatchFrontendMsg,
    CodecReply,
    EngineStats,
    NewDetokenizerMsg,
    Prompt,
    ReplyError,
    ShutdownMsg,
    TextLogprobs,
    TokenizeMsg,
    UserReply,
    encode_prompt,
    encoded_prompt,
)
from minisgl.processes.addresses import DETOKENIZER
from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.sampling_params import MAX_GRAMMAR, MAX_SEED, MIN_SEED
from minisgl.server.frontend import _DELIVERIES_PER_TURN, Frontend, _seed_after
from minisgl.server.generation import _MAX_UNREAD, Generation
from tests.server.harness import (
    replaceable_frontend,
    restartable_frontend,
    run,
    running_frontend,
    token_replies,
    wait_until,
)

PARAMS = SamplingParams(max_tokens=3, temperature=0.5)


def test_a_prompt_reaches_the_worker_and_its_replies_come_back_in_order() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            generation = frontend.submit(["hello"], PARAMS)
            msg = await worker.receive()
            assert msg == TokenizeMsg(msg.uid, "hello", PARAMS, first_uid=msg.uid)
            worker.send(UserReply(msg.uid, "a"))
            worker.send(
                UserReply(msg.uid, "b"), UserReply(msg.uid, "c", finish="length", num_output=3)
            )
            replies = [reply async for _, reply in generation]
            assert "".join(reply.text for reply in replies) == "abc"
            assert replies[-1].num_output == 3
            assert generation.has_ended
            assert frontend.num_open == 0

    run(scenario())


def test_a_reader_that_is_behind_gets_the_text_of_each_answer_as_one_reply() -> None:
    """However many replies come, a generation holds a bounded number."""

    async def scenario() -> None:
        generation = Generation(cast(Any, None), [5, 6])
        for number in range(1, 1001):
            for uid in (5, 6):
                generation.put(UserReply(uid, f"{uid},", num_prompt=3, num_output=number))
            assert sum(map(len, generation._unread.values())) <= 2 * _MAX_UNREAD
        generation.put(UserReply(5, "end", finish="length", num_prompt=3, num_output=1001))
        first, second = [await generation.next() for _ in range(2)]
        expected = UserReply(5, "5," * 1000 + "end", "length", num_prompt=3, num_output=1001)
        assert first == (0, expected)
        assert second == (1, UserReply(6, "6," * 1000, num_prompt=3, num_output=1000))

    run(scenario())


def test_log_probabilities_keep_to_their_text_and_a_reader_far_behind_loses_its_request() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            generation = frontend.submit(["a"], replace(PARAMS, logprobs=20), num_answers=2)
            uids = [(await worker.receive()).uid for _ in range(2)]
            token = TextLogprobs(b"x", -1.0, [(b"x", -1.0)] * 20)
            replies = [UserReply(uids[0], f"{i}", logprobs=[token]) for i in range(2)]
            worker.send(*replies)
            assert [await generation.next() for _ in replies] == [(0, reply) for reply in replies]

            worker.send(*[UserReply(uids[1], "y", logprobs=[token] * 100)] * 100)
            assert [await worker.receive() for _ in uids] == [AbortMsg(uid) for uid in uids]
            with pytest.raises(SlowReader, match="the limit is 131072"):
                await generation.next()
            assert frontend.num_open == 0

    run(scenario())


def scored(uid: int, text: str) -> UserReply:
    return UserReply(uid, text, logprobs=[TextLogprobs(text.encode(), -1.0, [])])


def test_a_reader_that_is_behind_gets_each_reply_with_log_probabilities_as_it_came() -> None:
    generation = Generation(cast(Any, None), [5], joins_replies=False)
    replies = [scored(5, f"{number},") for number in range(2 * _MAX_UNREAD)]
    for reply in replies:
        generation.put(reply)
    taken = []
    while generation.has_unread:
        taken.append(generation.take())
    assert taken == [(0, reply) for reply in replies]


def test_the_answers_take_turns_with_a_reader_that_is_behind_their_log_probabilities() -> None:
    generation = Generation(cast(Any, None), [5, 6], num_answers=2, joins_replies=False)
    for uid in (5, 6):
        for text in ("a", "b", "c"):
            generation.put(scored(uid, text))
    taken = [generation.take() for _ in range(6)]
    assert [(index, reply.text) for index, reply in taken] == [
        (index, text) for text in ("a", "b", "c") for index in (0, 1)
    ]


def test_a_reply_that_exceeds_two_limits_names_the_first() -> None:
    async def scenario() -> None:
        aborted: list[int] = []
        generation = Generation(aborted.append, [5, 6], joins_replies=False)
        many = [TextLogprobs(b"x", -1.0, [(b"x", -1.0)] * 20)] * 2**17
        generation.put(UserReply(5, "y", logprobs=many, prompt_logprobs=many))
        assert aborted == [5, 6]
        with pytest.raises(SlowReader, match="the limit is 131072"):
            await generation.next()

    run(scenario())


def test_large_prompts_and_grammars_are_not_sent_for_very_many_answers() -> None:
    """Each answer is a message with the whole prompt and the grammar."""

    async def scenario() -> None:
        async with running_frontend(max_open_requests=2000) as (frontend, worker):
            large = encoded_prompt(encode_prompt("a" * 2**22))
            with pytest.raises(InvalidRequest, match="at most 134217728") as refusal:
                frontend.submit([large, large], PARAMS, num_answers=16)
            assert refusal.value.param == "n"
            long = replace(PARAMS, grammar=Grammar("regex", "a" * MAX_GRAMMAR))
            with pytest.raises(InvalidRequest, match="at most 134217728"):
                frontend.submit(["a"] * 1025, long)
            assert frontend.num_open == 0

            generation = frontend.submit([large, large], PARAMS, num_answers=2)
            messages = [await worker.receive() for _ in range(4)]
            assert all(isinstance(msg, TokenizeMsg) for msg in messages)
            generation.close()

    run(scenario())


def test_replies_go_to_the_prompt_that_they_belong_to() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            generation = frontend.submit(["a", "b", "c"], PARAMS)
            other = frontend.submit(["d"], PARAMS)
            uids = [(await worker.receive()).uid for _ in range(4)]
            assert len(set(uids)) == 4
            worker.send(*(UserReply(uid, f"of {uid}", finish="stop") for uid in reversed(uids)))
            assert [(index, reply.text) async for index, reply in generation] == [
                (index, f"of {uids[index]}") for index in (2, 1, 0)
            ]
            assert [reply.text async for _, reply in other] == [f"of {uids[3]}"]
            assert frontend.num_open == 0

    run(scenario())


def test_more_prompts_than_may_ever_be_open_are_not_told_to_try_again() -> None:
    async def scenario() -> None:
        async with running_frontend(max_open_requests=2) as (frontend, _):
            with pytest.raises(InvalidRequest, match=r"3 answers .* at most 2") as refusal:
                frontend.submit(["a", "b", "c"], PARAMS)
            assert (refusal.value.status, refusal.value.param) == (400, None)

    run(scenario())


def test_beyond_the_limit_requests_are_refused_and_accepted_again_when_one_ends() -> None:
    async def scenario() -> None:
        async with running_frontend(max_open_requests=2) as (frontend, worker):
            first = frontend.submit(["a"], PARAMS)
            with pytest.raises(QueueFull, match=r"2 more: 1 requests are open and the limit is 2"):
                frontend.submit(["b", "c"], PARAMS)
            frontend.submit(["b"], PARAMS)
            with pytest.raises(QueueFull) as refusal:
                frontend.submit(["c"], PARAMS)
            assert refusal.value.status == 429
            worker.send(UserReply((await worker.receive()).uid, finish="stop"))
            await first.next()
            frontend.submit(["c"], PARAMS)
            assert frontend.num_open == 2
            assert [(await worker.receive()).prompt for _ in range(2)] == ["b", "c"], (
                "a refused prompt was sent"
            )

    run(scenario())


def test_closing_aborts_what_has_not_ended_once_and_on_its_own_way() -> None:
    async def scenario() -> None:
        async with running_frontend(num_tokenizer=3) as (frontend, worker):
            generation = frontend.submit(["a", "b", "c"], PARAMS)
            uids = [(await worker.receive(i)).uid for i in range(3)]
            worker.send(UserReply(uids[1], finish="stop"))
            await generation.next()
            generation.close()
            generation.close()
            assert frontend.num_open == 0
            assert generation.has_ended
            for i in (0, 2):
                assert await worker.receive(i) == AbortMsg(uids[i]), (
                    "the abort follows its request on the same queue"
                )
            next_one = frontend.submit(["d", "e", "f"], PARAMS)
            for i in range(3):
                assert isinstance(await worker.receive(i), TokenizeMsg), "nothing was aborted twice"
            next_one.close()

    run(scenario())


def test_replies_to_a_request_that_was_given_up_are_dropped() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            aborted = frontend.submit(["a"], PARAMS)
            kept = frontend.submit(["b"], PARAMS)
            uids = [(await worker.receive()).uid for _ in range(2)]
            aborted.close()
            worker.send(
                UserReply(uids[0], "late"),
                UserReply(uids[0], finish="abort"),
                UserReply(12345, "unknown"),
            )
            worker.send(UserReply(uids[1], "b", finish="stop"))
            assert [reply.text async for _, reply in kept] == ["b"]
            assert frontend.num_open == 0

    run(scenario())


def test_a_refusal_arrives_with_its_status_and_the_other_prompts_are_aborted() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            generation = frontend.submit(["a", "b"], PARAMS)
            first, second = [(await worker.receive()).uid for _ in range(2)]
            worker.send(
                UserReply(first, error=ReplyError(418, "teapot", "short and stout", "spout"))
            )
            with pytest.raises(RequestError, match="short and stout") as refusal:
                await generation.next()
            assert (refusal.value.status, refusal.value.code, refusal.value.param) == (
                418,
                "teapot",
                "spout",
            )
            generation.close()
            assert await worker.receive() == AbortMsg(second)
            assert frontend.num_open == 0

    run(scenario())


def test_what_had_come_before_an_error_can_still_be_read() -> None:
    async def scenario() -> None:
        async with running_frontend(8) as (frontend, _):
            generation = frontend.submit(["x"], SamplingParams())
            (uid,) = generation._index_of
            generation.put(UserReply(uid, text="so far"))
            generation.put(UserReply(uid, error=ReplyError(418, "teapot", "short and stout")))

            index, reply = await generation.next()
            assert (index, reply.text) == (0, "so far")
            with pytest.raises(RequestError, match="short and stout"):
                await generation.next()
            generation.close()

    run(scenario())


def test_the_first_error_of_a_request_stays_and_nothing_that_comes_later_is_kept() -> None:
    async def scenario() -> None:
        generation = Generation(cast(Any, None), [5, 6, 7])
        generation.put(UserReply(5, error=ReplyError(418, "teapot", "short and stout")))
        generation.put(UserReply(6, error=ReplyError(400, "late", "tall and thin")))
        generation.put(UserReply(7, "late"))
        assert not generation.has_unread
        with pytest.raises(RequestError, match="short and stout"):
            await generation.next()

    run(scenario())


def test_a_failure_reaches_every_open_request_and_new_ones_are_refused() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            waiting = [frontend.submit(["a"], PARAMS) for _ in range(3)] + [
                frontend.submit(["b", "c"], PARAMS)
            ]
            tasks = [asyncio.create_task(generation.next()) for generation in waiting]
            half_read = frontend.submit(["d"], PARAMS)
            uid = [(await worker.receive()).uid for _ in range(6)][-1]
            worker.send(UserReply(uid, "so far"))
            assert (await half_read.next())[1].text == "so far"

            frontend.fail("the engine is gone")
            for error in await asyncio.gather(*tasks, half_read.next(), return_exceptions=True):
                assert isinstance(error, EngineFailed)
                assert str(error) == "the engine is gone"
            assert not any(generation.has_ended for generation in (*waiting, half_read))
            assert frontend.num_open == 0
            assert frontend.refusal is not None
            with pytest.raises(EngineFailed, match="the engine is gone"):
                frontend.submit(["e"], PARAMS)
            for generation in waiting:
                generation.close()

    run(scenario())


def test_a_drain_refuses_new_requests_and_ends_when_the_open_ones_have() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            generation = frontend.submit(["a"], PARAMS)
            asking = asyncio.create_task(frontend.questions.decode([1]))
            uids = [(await worker.receive()).uid for _ in range(2)]
            frontend.refuse("going")
            draining = asyncio.create_task(frontend.drained())
            with pytest.raises(Unavailable, match="going"):
                frontend.submit(["b"], PARAMS)
            with pytest.raises(Unavailable, match="going"):
                await frontend.questions.decode([2])
            worker.send(UserReply(uids[0], "all", finish="stop"))
            assert [reply.text async for _, reply in generation] == ["all"]
            assert not draining.done()
            worker.send_message(CodecReply(uids[1], text="x"))
            assert await asking == "x"
            await draining

    run(scenario())


def test_a_request_that_takes_too_long_is_aborted() -> None:
    async def scenario() -> None:
        async with running_frontend(request_timeout_s=1.0) as (frontend, worker):
            generation = frontend.submit(["a", "b"], PARAMS)
            uids = [(await worker.receive()).uid for _ in range(2)]
            worker.send(UserReply(uids[0], "whole", finish="stop"))
            assert [await worker.receive()] == [AbortMsg(uids[1])]
            with pytest.raises(RequestTimeout, match=r"longer than the limit of 1 s") as late:
                await generation.collect()
            assert (late.value.status, late.value.code) == (504, "timeout")
            asking = asyncio.create_task(frontend.questions.decode([1]))
            question = await worker.receive()
            with pytest.raises(RequestTimeout):
                await asking
            assert await worker.receive() == AbortMsg(question.uid)
            assert frontend.num_open == 0

    run(scenario())


def test_api_processes_give_uids_of_their_own_and_share_the_limit_of_open_requests(
    tmp_path: Path,
) -> None:
    """Each is behind a tokenizer queue of its own here, so that its messages are told apart."""

    async def scenario() -> None:
        def open_frontend(api: int) -> Any:
            shared = SharedNumbers(tmp_path, 2)
            return running_frontend(3, num_tokenizer=2, api=api, num_api=2, shared=shared)

        async with open_frontend(0) as (first, worker), open_frontend(1) as (second, other):
            generation = first.submit(["a", "b"], PARAMS)
            others = second.submit(["c"], PARAMS)
            assert [(await worker.receive(i)).uid for i in range(2)] == [0, 2]
            assert (await other.receive(0)).uid == 1
            assert first.num_open_in_all == second.num_open_in_all == 3
            for frontend in (first, second):
                with pytest.raises(QueueFull, match="3 requests are open and the limit is 3"):
                    frontend.submit(["d"], PARAMS)
            with pytest.raises(InvalidRequest, match="4 answers"):
                second.submit(["d"], PARAMS, num_answers=4)

            draining = asyncio.create_task(first.drained())
            worker.send(UserReply(0, "x", finish="stop"), UserReply(2, "y", finish="stop"))
            await generation.collect()
            assert (first.num_open, second.num_open, first.num_open_in_all) == (0, 1, 1)
            assert not draining.done()
            others.close()
            await draining

    run(scenario())


DETOKENIZER_DIED = NewDetokenizerMsg(1)
TOKENIZER_DIED = NewDetokenizerMsg(0)


def test_over_the_death_of_a_tokenizer_only_what_waited_in_it_is_sent_again() -> None:
    async def scenario() -> None:
        async with replaceable_frontend(num_tokenizer=2) as (frontend, workers, replace_worker):
            begun, other, lost = [frontend.submit([prompt], PARAMS) for prompt in "abc"]
            uids = [(await workers[0].receive(i)).uid for i in (0, 1, 0)]
            workers[0].send(UserReply(uids[0], "so "))
            assert await begun.next() == (0, UserReply(uids[0], "so "))

            successor = await replace_worker("tokenizer-0")
            assert frontend.refusal is None
            assert [await successor.receive() for _ in range(2)] == [
                TOKENIZER_DIED,
                AbortMsg(uids[2]),
            ]
            assert await workers[0].receive(1) == TOKENIZER_DIED
            sent = await successor.receive()
            assert (sent.prompt, sent.sampling) == ("c", PARAMS)
            assert sent.uid not in uids

            workers[0].send(
                UserReply(uids[2], "nobody's", finish="stop"),
                UserReply(uids[0], "far", finish="stop"),
                UserReply(uids[1], "b", finish="stop"),
                UserReply(sent.uid, "c", finish="stop"),
            )
            assert await texts(begun) == [(0, "far")]
            assert await texts(other) == [(0, "b")]
            assert await texts(lost) == [(0, "c")]
            assert frontend.num_open == 0

    run(scenario())


def test_over_the_death_of_the_detokenizer_requests_without_a_token_go_on_and_others_fail() -> None:
    async def scenario() -> None:
        async with replaceable_frontend() as (frontend, workers, replace_worker):
            begun, half, waiting = [frontend.submit(["a"] * n, PARAMS) for n in (1, 2, 1)]
            uids = [(await workers[0].receive()).uid for _ in range(4)]
            workers[0].send(UserReply(uids[0], "so far"), UserReply(uids[1], "so far"))
            await wait_until(lambda: begun.has_unread and half.has_unread)

            await replace_worker(DETOKENIZER)
            told = [await workers[0].receive() for _ in range(6)]
            assert told[0] == DETOKENIZER_DIED
            aborted = {msg.uid for msg in told if isinstance(msg, AbortMsg)}
            assert aborted == set(uids)
            assert isinstance(told[-1], TokenizeMsg)
            for generation in (begun, half):
                assert (await generation.next())[1].text == "so far"
                with pytest.raises(EngineFailed, match="detokenizer died"):
                    await generation.next()
            workers[0].send(UserReply(told[-1].uid, "all", finish="stop"))
            assert await texts(waiting) == [(0, "all")]
            assert frontend.num_open == 0

    run(scenario())


def test_without_tokenizers_the_detokenizers_successor_gets_what_waited() -> None:
    async def scenario() -> None:
        async with replaceable_frontend(num_tokenizer=0) as (frontend, workers, replace_worker):
            waiting = frontend.submit(["a"], PARAMS)
            uid = (await workers[0].receive()).uid
            asking = asyncio.create_task(frontend.questions.decode([1]))
            question = await workers[0].receive()

            successor = await replace_worker(DETOKENIZER)
            told = [await successor.receive() for _ in range(4)]
            assert told[:2] == [DETOKENIZER_DIED, AbortMsg(uid)]
            assert told[3] == question
            workers[0].send(UserReply(told[2].uid, "all", finish="stop"))
            workers[0].send_message(CodecReply(question.uid, text="one"))
            assert await texts(waiting) == [(0, "all")]
            assert await asking == "one"

    run(scenario())


def test_what_was_lost_twice_with_dead_workers_ends_with_an_error() -> None:
    async def scenario() -> None:
        async with replaceable_frontend() as (frontend, workers, replace_worker):
            waiting = frontend.submit(["a"], PARAMS)
            asking = asyncio.create_task(frontend.questions.decode([1]))
            await workers[0].receive()
            await workers[0].receive()
            await replace_worker("tokenizer-0")
            await replace_worker("tokenizer-0")
            with pytest.raises(EngineFailed, match="tokenizer-0 died"):
                await waiting.next()
            with pytest.raises(Unavailable, match="tokenizer-0 died"):
                await asking
            assert frontend.num_open == 0

    run(scenario())


def test_a_request_whose_abort_was_lost_is_aborted_when_it_answers() -> None:
    async def scenario() -> None:
        async with replaceable_frontend() as (frontend, workers, replace_worker):
            gone, ended = [frontend.submit(["a"], PARAMS) for _ in range(2)]
            uids = [(await workers[0].receive()).uid for _ in range(2)]
            gone.close()
            ended.close()
            successor = await replace_worker("tokenizer-0")
            new = frontend.submit(["b"], PARAMS)
            new.close()
            assert await successor.receive() == TOKENIZER_DIED
            sent = await successor.receive()
            assert await successor.receive() == AbortMsg(sent.uid)
            workers[0].send(
                UserReply(sent.uid, "its abort is on its way"),
                UserReply(uids[0], "a"),
                UserReply(uids[0], "b"),
                UserReply(uids[1], "c", finish="stop"),
            )
            assert await successor.receive() == AbortMsg(uids[0])
            frontend.submit(["c"], PARAMS).close()
            assert (await successor.receive()).prompt == "c", "it is aborted once more, not twice"

    run(scenario())


def test_an_abort_may_be_lost_with_every_worker_that_dies() -> None:
    async def scenario() -> None:
        async with replaceable_frontend() as (frontend, workers, replace_worker):
            gone = frontend.submit(["a"], PARAMS)
            uid = (await workers[0].receive()).uid
            gone.close()
            for _ in range(3):
                successor = await replace_worker("tokenizer-0")
                assert await successor.receive() == TOKENIZER_DIED
                workers[0].send(UserReply(uid, "a"))
                assert await successor.receive() == AbortMsg(uid)

    run(scenario())


class _Prompts(list[Prompt]):
    """Prompts of which can be seen whether anything still has them."""


@pytest.mark.parametrize(
    "end",
    [
        lambda frontend: frontend.suspend("it died", 7),
        lambda frontend: frontend.refuse("it shuts down"),
        lambda frontend: frontend.fail("it is gone"),
    ],
)
def test_nothing_of_a_refused_request_is_kept(end: Callable[[Frontend], None]) -> None:
    """Else an outage would keep all that is sent meanwhile, through the frames of the refusals."""

    async def scenario() -> None:
        async with restartable_frontend() as (frontend, _, _):
            end(frontend)
            prompts = _Prompts(["a"])
            kept = weakref.ref(prompts)
            with contextlib.suppress(Unavailable, EngineFailed):
                frontend.submit(prompts, PARAMS)
            del prompts
            assert kept() is None

    run(scenario())


async def texts(generation: Generation) -> list[tuple[int, str]]:
    return [(index, reply.text) async for index, reply in generation]


def test_over_an_outage_requests_without_a_token_go_on_unseen_and_others_fail() -> None:
    """A reply to the uid of an earlier epoch is nobody's."""

    async def scenario() -> None:
        async with restartable_frontend() as (frontend, worker, restart):
            begun, batch, waiting = [frontend.submit(["a"] * n, PARAMS) for n in (2, 2, 1)]
            uids = [(await worker.receive()).uid for _ in range(5)]
            worker.send(UserReply(uids[0], "so far"), UserReply(uids[2], "whole", finish="stop"))
            assert await begun.next() == (0, UserReply(uids[0], "so far"))
            await wait_until(lambda: frontend.num_open == 4)
            asking = asyncio.create_task(frontend.questions.decode([1]))
            await worker.receive()

            frontend.suspend("it died", 7)
            with pytest.raises(EngineFailed, match="it died"):
                await begun.next()
            for refused in (asking, frontend.questions.decode([1])):
                with pytest.raises(Unavailable, match="starts again: it died") as refusal:
                    await refused
                assert refusal.value.retry_after_s == 7
            assert frontend.refusal is not None
            assert frontend.num_open == 2

            worker = await restart()
            worker.send(UserReply(uids[4], "stale", finish="stop"))
            second = [await worker.receive() for _ in range(2)]
            assert not {msg.uid for msg in second} & set(uids)
            assert all((msg.prompt, msg.sampling) == ("a", PARAMS) for msg in second)
            worker.send(*(UserReply(msg.uid, "b", finish="stop") for msg in second))
            assert await texts(batch) == [(0, "whole"), (1, "b")]
            assert await texts(waiting) == [(0, "b")]
            assert frontend.refusal is None

    run(scenario())


def test_gauges_are_zero_from_the_end_of_an_epoch_to_the_first_step_of_the_next() -> None:
    """What the dead scheduler sent last may come after its end."""
    gauges = ("requests_running", "requests_waiting", "kv_pages_used_ratio", "step_budget_tokens")
    stats = EngineStats(3, 2, 4, 8, 0, 0, 0, 0, budget_tokens=64, budget_ms=5.0)

    def seen(frontend: Frontend) -> list[float]:
        lines = frontend.metrics.expose().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return [float(values[f"minisgl_{gauge}"]) for gauge in gauges]

    async def scenario() -> None:
        async with restartable_frontend() as (frontend, worker, restart):
            worker.send_message(BatchFrontendMsg([], stats))
            await wait_until(lambda: seen(frontend) == [3, 2, 0.5, 64])
            frontend.suspend("it died", 1)
            assert seen(frontend) == [0, 0, 0, 0]
            worker.send_message(BatchFrontendMsg([], stats))
            await asyncio.sleep(0.1)
            assert seen(frontend) == [0, 0, 0, 0]
            restarted = await restart()
            assert seen(frontend) == [0, 0, 0, 0]
            restarted.send_message(BatchFrontendMsg([], msgspec.structs.replace(stats, epoch=1)))
            await wait_until(lambda: seen(frontend) == [3, 2, 0.5, 64])

    run(scenario())


def test_what_an_earlier_epoch_sent_is_dropped_also_in_the_middle_of_a_batch() -> None:
    """A batch is delivered in several turns of the loop; the workers may fail between two."""

    async def scenario() -> None:
        async with restartable_frontend() as (frontend, worker, restart):
            first = frontend.submit(["a"], PARAMS)
            last = frontend.submit(["b"], PARAMS)
            uids = [(await worker.receive()).uid for _ in range(2)]

            def fail() -> None:
                first.take()
                frontend.suspend("it died", 1)

            reading = asyncio.create_task(first.wait_for_more(fail))
            await asyncio.sleep(0)
            worker.send(UserReply(uids[0], "x"), UserReply(uids[1], "stale", finish="stop"))
            with pytest.raises(EngineFailed, match="it died"):
                await reading

            worker = await restart()
            again = await worker.receive()
            worker.send(UserReply(again.uid, "new", finish="stop"))
            assert await texts(last) == [(0, "new")]

    run(scenario())


def test_a_request_is_sent_again_once_and_not_when_its_client_has_gone() -> None:
    async def scenario() -> None:
        async with restartable_frontend() as (frontend, worker, restart):
            gone, waiting = [frontend.submit([prompt], PARAMS) for prompt in ("a", "b")]
            frontend.suspend("it died", 1)
            gone.close()
            worker = await restart()
            assert (await worker.receive()).prompt == "b"
            frontend.suspend("it died again", 1)
            with pytest.raises(EngineFailed, match="it died again"):
                await waiting.next()
            worker = await restart()
            frontend.submit(["c"], PARAMS)
            assert (await worker.receive()).prompt == "c"

    run(scenario())


def test_nothing_is_kept_of_clients_that_leave_before_or_during_an_outage() -> None:
    """Their last replies never come: the workers are dead."""

    async def scenario() -> None:
        async with restartable_frontend() as (frontend, _, restart):
            early, late = [frontend.submit(["a"], PARAMS) for _ in range(2)]
            early.close()
            frontend.suspend("it died", 1)
            late.close()
            await restart()
            assert not frontend._requests._aborted

    run(scenario())


def test_what_had_come_before_a_failure_can_still_be_read() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            done = frontend.submit(["a"], PARAMS)
            cut = frontend.submit(["b"], PARAMS)
            uids = [(await worker.receive()).uid for _ in range(2)]
            worker.send(UserReply(uids[0], "all", finish="stop"), UserReply(uids[1], "part"))
            await wait_until(lambda: frontend.num_open == 1)
            frontend.fail("gone")
            assert [reply.text async for _, reply in done] == ["all"]
            assert (await cut.next())[1].text == "part"
            with pytest.raises(EngineFailed):
                await cut.next()

    run(scenario())


def test_a_request_that_cannot_be_sent_is_not_open() -> None:
    async def scenario() -> None:
        async with running_frontend(max_open_requests=1) as (frontend, _worker):
            with pytest.raises(UnicodeEncodeError):
                frontend.submit(["\ud800"], PARAMS)
            with pytest.raises(UnicodeEncodeError):
                await frontend.questions.encode("\ud800")
            assert frontend.num_open == 0
            assert frontend.num_open_in_all == 0, "it would take a place for ever"

    run(scenario())


@pytest.mark.parametrize("num_tokenizer", [1, 3])
def test_at_the_end_every_tokenizer_is_told_and_one_passes_it_on(num_tokenizer: int) -> None:
    async def scenario() -> None:
        async with running_frontend(num_tokenizer=num_tokenizer) as (frontend, worker):
            frontend.shut_down()
            messages = [await worker.receive(i) for i in range(num_tokenizer)]
            assert messages == [ShutdownMsg(stops_scheduler=i == 0) for i in range(num_tokenizer)]

    run(scenario())


def test_a_thousand_requests_of_all_ends_leave_nothing_behind() -> None:
    async def scenario() -> None:
        async with running_frontend(max_open_requests=64) as (frontend, worker):
            worker.answer_with(token_replies("a", "b", "c"))

            async def ask(number: int) -> None:
                generation = frontend.submit(["x"], PARAMS)
                try:
                    num_output = 0
                    while num_output < number % 4:
                        _, reply = await generation.next()
                        num_output = reply.num_output
                finally:
                    generation.close()

            for start in range(0, 1000, 50):
                await asyncio.gather(*(ask(number) for number in range(start, start + 50)))
                assert frontend.num_open == 0

    run(scenario())


def test_the_smallest_seed_follows_the_largest() -> None:
    assert [_seed_after(MAX_SEED - 1, i) for i in range(3)] == [MAX_SEED - 1, MAX_SEED, MIN_SEED]
    assert [_seed_after(-3, i) for i in range(2)] == [-3, -2]
    assert [_seed_after(MIN_SEED, i) for i in range(2)] == [MIN_SEED, MIN_SEED + 1]
    assert _seed_after(None, 1) is None


def test_a_reader_is_called_at_each_reply_while_it_waits_and_takes_what_it_wants() -> None:
    async def scenario() -> None:
        generation = Generation(cast(Any, None), [5])
        texts: list[str] = []
        is_ready = True

        def read() -> None:
            if is_ready:
                texts.append(generation.take()[1].text)

        waiting = asyncio.create_task(generation.wait_for_more(read))
        await asyncio.sleep(0)
        for text in "abc":
            generation.put(UserReply(5, text))
        await asyncio.sleep(0)
        assert texts == ["a", "b", "c"]
        assert not waiting.done()  # no task was woken

        is_ready = False
        generation.put(UserReply(5, "d"))
        await waiting
        generation.put(UserReply(5, "e", finish="stop"))  # nobody waits
        assert generation.take()[1].text == "de"
        assert texts == ["a", "b", "c"]
        await generation.wait_for_more(read)  # all has ended

    run(scenario())


def test_a_bug_of_a_reader_is_raised_where_it_waits_and_not_at_the_delivery() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            broken = frontend.submit(["a"], PARAMS)
            whole = frontend.submit(["b"], PARAMS)
            uids = [(await worker.receive()).uid for _ in range(2)]
            waiting = asyncio.create_task(broken.wait_for_more(lambda: cast(None, 1 / 0)))
            await asyncio.sleep(0)
            worker.send(*(UserReply(uid, "x", finish="stop") for uid in uids))
            with pytest.raises(ZeroDivisionError):
                await waiting
            assert (await whole.next())[1].text == "x"

    run(scenario())


def test_a_large_step_is_delivered_in_several_turns_of_the_loop() -> None:
    async def scenario() -> None:
        async with running_frontend(max_open_requests=1000) as (frontend, worker):
            generation = frontend.submit(["a"], PARAMS, num_answers=1000)
            uids = [(await worker.receive()).uid for _ in range(1000)]
            counts: list[int] = []

            async def count() -> None:
                while not counts or counts[-1] < 1000:
                    counts.append(len(generation._unread))
                    await asyncio.sleep(0)

            worker.send(*(UserReply(uid, "x") for uid in uids))
            await count()
            steps = [after - before for before, after in pairwise(counts)]
            assert max(steps) <= _DELIVERIES_PER_TURN
            generation.close()

    run(scenario())
