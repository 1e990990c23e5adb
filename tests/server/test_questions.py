"""Questions to tokenizers and the scheduler: each has a place, and gets its own answer."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed, QueueFull, RequestError, Unavailable
from minisgl.message import (
    AbortMsg,
    BatchFrontendMsg,
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    EngineStats,
    NewDetokenizerMsg,
    ReplyError,
    pack_ids,
)
from minisgl.processes.addresses import DETOKENIZER
from tests.server.harness import replaceable_frontend, run, running_frontend

PARAMS = SamplingParams(max_tokens=3, temperature=0.5)


def test_questions_go_to_all_tokenizers_in_turn_and_each_gets_its_own_answer() -> None:
    async def scenario() -> None:
        async with running_frontend(num_tokenizer=2) as (frontend, worker):
            questions = frontend.questions
            encoding = asyncio.create_task(questions.encode("text", add_special_tokens=False))
            decoding = asyncio.create_task(questions.decode([1, 2]))
            first, second = [await worker.receive(i) for i in range(2)]
            assert first == EncodeMsg(first.uid, "text", add_special_tokens=False)
            assert second == DecodeMsg(second.uid, pack_ids([1, 2]))
            worker.send_message(CodecReply(second.uid, text="two"))
            worker.send_message(CodecReply(first.uid, ids=pack_ids([5, 6, 7])))
            assert await encoding == [5, 6, 7]
            assert await decoding == "two"
            assert frontend.num_open == 0

    run(scenario())


def test_a_question_takes_a_place_and_one_that_is_given_up_leaves_it() -> None:
    async def scenario() -> None:
        async with running_frontend(max_open_requests=1) as (frontend, worker):
            asking = asyncio.create_task(frontend.questions.decode([1]))
            uid = (await worker.receive()).uid
            assert frontend.num_open == 1
            with pytest.raises(QueueFull):
                frontend.submit(["a"], PARAMS)
            with pytest.raises(QueueFull):
                await frontend.questions.encode("a")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert frontend.num_open == 0
            assert await worker.receive() == AbortMsg(uid)
            worker.send_message(CodecReply(uid, text="late"))
            again = asyncio.create_task(frontend.questions.decode([2]))
            worker.send_message(CodecReply((await worker.receive()).uid, text="in time"))
            assert await again == "in time"

    run(scenario())


def test_a_question_is_refused_by_the_tokenizer_or_by_an_engine_that_is_gone() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            asking = asyncio.create_task(frontend.questions.decode([1]))
            worker.send_message(
                CodecReply((await worker.receive()).uid, error=ReplyError(400, "c", "no", "tokens"))
            )
            with pytest.raises(RequestError, match="no") as refusal:
                await asking
            assert (refusal.value.status, refusal.value.code, refusal.value.param) == (
                400,
                "c",
                "tokens",
            )
            asking = asyncio.create_task(frontend.questions.decode([1]))
            await worker.receive()
            frontend.fail("gone")
            for question in (asking, frontend.questions.decode([1])):
                with pytest.raises(EngineFailed, match="gone"):
                    await question
            assert frontend.num_open == 0

    run(scenario())


def test_a_flush_of_the_cache_is_answered_by_its_uid() -> None:
    async def scenario() -> None:
        async with running_frontend() as (frontend, worker):
            flushes = [asyncio.create_task(frontend.questions.flush_cache()) for _ in range(3)]
            uids = [(await worker.receive()).uid for _ in flushes]
            flushes[1].cancel()
            answers = [(uids[2], 0), (uids[1], 4), (99, 7), (uids[0], 8)]
            stats = EngineStats(0, 0, 0, 9, 0, 0, 0, 0, flushes=answers)
            worker.send_message(BatchFrontendMsg([], stats))
            assert [await flushes[0], await flushes[2]] == [8, 0]
            assert await worker.receive() == AbortMsg(uids[1])
            assert frontend.num_open == frontend.num_open_in_all == 0

            lost = asyncio.create_task(frontend.questions.flush_cache())
            await worker.receive()
            frontend.suspend("it died", 1)
            for refused in (lost, frontend.questions.flush_cache()):
                with pytest.raises(Unavailable, match="it died"):
                    await refused

    run(scenario())


def test_a_flush_whose_answer_may_be_lost_with_the_detokenizer_is_sent_again() -> None:
    async def scenario() -> None:
        async with replaceable_frontend() as (frontend, workers, replace_worker):
            flushing = asyncio.create_task(frontend.questions.flush_cache())
            flush = await workers[0].receive()
            asking = asyncio.create_task(frontend.questions.decode([1]))
            question = await workers[0].receive()
            await replace_worker(DETOKENIZER)
            assert [await workers[0].receive() for _ in range(2)] == [NewDetokenizerMsg(1), flush]
            stats = EngineStats(0, 0, 0, 9, 0, 0, 0, 0, flushes=[(flush.uid, 4)])
            workers[0].send_message(BatchFrontendMsg([], stats))
            workers[0].send_message(CodecReply(question.uid, text="one"))
            assert [await flushing, await asking] == [4, "one"]

    run(scenario())


def test_the_second_answer_to_a_flush_that_was_sent_twice_is_nobodys() -> None:
    """Both may come in one message, before the caller reads the first; the delivery goes on."""

    async def scenario() -> None:
        async with replaceable_frontend() as (frontend, workers, replace_worker):
            flushing = asyncio.create_task(frontend.questions.flush_cache())
            flush = await workers[0].receive()
            await replace_worker(DETOKENIZER)
            assert [await workers[0].receive() for _ in range(2)] == [NewDetokenizerMsg(1), flush]
            answers = [(flush.uid, 4), (flush.uid, 0)]
            stats = EngineStats(0, 0, 0, 9, 0, 0, 0, 0, flushes=answers)
            workers[0].send_message(BatchFrontendMsg([], stats))
            assert await flushing == 4

    run(scenario())
