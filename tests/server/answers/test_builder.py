"""Streams of chats and text completions: usage, order of chunks, errors in the middle."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.message import AbortMsg, ReplyError, TextLogprobs, TokenizeMsg, UserReply
from minisgl.server.answers.builder import AnswerBuilder
from minisgl.server.anthropic import MessagesBuilder, MessagesRequest
from minisgl.server.generation import Generation
from minisgl.server.openai.chat import ChatBuilder, ChatRequest
from minisgl.server.openai.completions import CompletionBuilder, CompletionRequest
from minisgl.server.openai.responses import ResponsesBuilder
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from minisgl.server.parsing.tool_formats import TOOL_FORMATS
from tests.server.harness import (
    BODIES,
    CHAT,
    RESPONSES,
    TEXT,
    App,
    HttpCall,
    assert_is_error,
    events_of,
    routes,
    run_with_app,
    token_replies,
    wait_until,
)


@routes
def test_a_stream_that_asks_for_usage_ends_with_it(route: str) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a", "b", num_prompt=7, num_cached=6))
        call = app.post(route, stream=True, stream_options={"include_usage": True})
        await call.done
        *chunks, usage, done = events_of(call)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 9
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
        assert done == "[DONE]"
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1

    run_with_app(scenario)


@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
def test_an_event_is_one_line_to_readers_that_know_more_ends_of_lines(route: str) -> None:
    """As httpx reads lines, and Python's `str.splitlines` does."""
    said = "a\x85b\u2028c\u2029d\x0be"

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies(said))
        prompt = {"input": "hi"} if route == RESPONSES else {}
        call = app.post(route, stream=True, **prompt)
        await call.done
        lines = [line for line in call.body.decode().splitlines() if line]
        assert all(line.startswith(("data: ", "event: ")) for line in lines)
        assert said in map(text_of, lines)

    def text_of(line: str) -> str | None:
        data = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        if route == RESPONSES:
            return data.get("delta")
        [choice] = data.get("choices", [{}])
        return choice.get("text") or choice.get("delta", {}).get("content")

    run_with_app(scenario)


@routes
@pytest.mark.parametrize("include_usage", [False, True])
def test_every_chunk_has_the_usage_so_far_of_its_answer(route: str, include_usage: bool) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a", "b", num_prompt=7, num_cached=6))
        call = app.post(route, stream=True, stream_options=options, n=2)
        await call.done
        *chunks, done = events_of(call)
        last = chunks.pop() if include_usage else None
        for chunk in chunks:
            assert chunk["usage"]["prompt_tokens"] == 7
            assert chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
        for index in range(2):
            usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts)  # a reader that is behind gets several at once
            assert counts[-1] == 2
            if route == CHAT:
                assert counts[0] == 0  # the chunk with the role
            assert [usage["total_tokens"] for usage in usages] == [
                7 + usage["completion_tokens"] for usage in usages
            ]
        if last:
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 4
        assert done == "[DONE]"

    run_with_app(scenario)


@routes
def test_a_stream_that_does_not_ask_for_usage_has_none(route: str) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        call = app.post(route, stream=True)
        await call.done
        assert not any("usage" in chunk for chunk in events_of(call)[:-1])

    run_with_app(scenario)


def test_a_streams_first_piece_is_sent_before_its_second_is_made() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "first"))
        await wait_until(lambda: b"first" in call.body)
        app.worker.send(UserReply(uid, "second", finish="stop"))
        await call.done
        assert [event["choices"][0]["text"] for event in events_of(call)[:-1]] == [
            "first",
            "second",
        ]

    run_with_app(scenario)


@routes
def test_a_large_whole_answer_is_sent_in_pieces(route: str) -> None:
    """A connection copies what it is given, and the loop waits for that."""
    tokens = [TextLogprobs(b"a" * 2**10, -1.0, []) for _ in range(2**9)]

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, "a", finish="stop", logprobs=tokens, num_output=2**9)]
        )
        call = app.post(route, logprobs=True if route == CHAT else 1)
        await call.done
        assert len(json.loads(call.body)["choices"]) == 1
        assert len(call.body) == int(call.headers["content-length"]) > 2**19
        assert max(map(len, call.chunks)) <= 2**17

    run_with_app(scenario)


@routes
def test_an_engine_that_dies_in_mid_stream_is_the_last_event(route: str) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, stream=True)
        app.worker.send(UserReply((await app.worker.receive()).uid, "part"))
        await wait_until(lambda: b"part" in call.body)
        app.frontend.fail("the engine is gone")
        await call.done
        assert call.status == 200
        error = events_of(call)[-1]
        assert error == {
            "error": {
                "message": "the engine is gone",
                "type": "server_error",
                "param": None,
                "code": "engine_failed",
            }
        }

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_in_the_middle_of_an_answer_is_said_of_its_field(stream: bool) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, guided_regex="x+", stream=stream)
        uid = (await app.worker.receive()).uid
        error = ReplyError(400, "invalid_value", "it is too large", "grammar")
        app.worker.send(UserReply(uid, "x"))
        if stream:
            await wait_until(lambda: bool(call.chunks))
        app.worker.send(UserReply(uid, error=error))
        await call.done
        error_body = (events_of(call) if stream else [json.loads(call.body)])[-1]["error"]
        assert (error_body["message"], error_body["param"]) == ("it is too large", "guided_regex")

    run_with_app(scenario)


def test_many_streams_at_once_do_not_mix() -> None:
    async def scenario(app: App) -> None:
        calls = [app.post(TEXT, prompt=f"p{i}", stream=True) for i in range(8)]
        msgs: list[TokenizeMsg] = [await app.worker.receive() for _ in calls]
        for piece in range(5):
            app.worker.send(
                *(
                    UserReply(m.uid, f"{m.prompt}.{piece} ", finish="stop" if piece == 4 else None)
                    for m in msgs
                )
            )
        await asyncio.gather(*(call.done for call in calls))
        for i, call in enumerate(calls):
            text = "".join(event["choices"][0]["text"] for event in events_of(call)[:-1])
            assert text == "".join(f"p{i}.{piece} " for piece in range(5))

    run_with_app(scenario)


def test_a_stream_of_several_answers_begins_with_the_first_of_each_prompt() -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b"], n=2, stream=True)
        uids = [(await app.worker.receive()).uid for _ in range(4)]
        app.worker.send(UserReply(uids[1], "<1>"))
        app.worker.send(UserReply(uids[2], "<2>"))
        await wait_until(lambda: b"<2>" in call.body)
        for uid in uids:
            app.worker.send(UserReply(uid, finish="stop"))
        await call.done
        shown = [
            (event["choices"][0]["index"], event["choices"][0]["text"])
            for event in events_of(call)[:-1]
        ]
        assert shown[:2] == [(1, "<1>"), (2, "<2>")]

    run_with_app(scenario)


WITH_LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True},
    TEXT: {"logprobs": 0},
    RESPONSES: {"include": ["message.output_text.logprobs"]},
}


def logprob_tokens(node: Any) -> list[str]:
    """The tokens that have log probabilities in an answer or in events, in order."""
    if isinstance(node, list):
        return [token for child in node for token in logprob_tokens(child)]
    if not isinstance(node, dict):
        return []
    if "token" in node:
        return [node["token"]]
    if "tokens" in node:
        return list(node["tokens"])
    return [token for child in node.values() for token in logprob_tokens(child)]


def deltas_of(call: HttpCall) -> list[Any]:
    """The events of a stream that have new text."""
    lines = call.body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    events = [json.loads(text) for text in data]
    types = (None, "response.output_text.delta")
    return [event for event in events if event.get("type") in types]


@pytest.mark.parametrize("route", WITH_LOGPROBS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_several_tokens_has_the_logprobs_of_each(route: str, stream: bool) -> None:
    starts = {b"a": 0, b"bc": 1, b"d": 3}
    tokens = [TextLogprobs(token, -0.5, [], start) for token, start in starts.items()]

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [
                UserReply(msg.uid, "abc", logprobs=tokens[:2], num_output=2),
                UserReply(msg.uid, "d", logprobs=tokens[2:], finish="stop", num_output=3),
            ]
        )
        call = app.post(route, stream=stream, **WITH_LOGPROBS[route])
        await call.done
        answer = deltas_of(call) if stream else json.loads(call.body)
        assert logprob_tokens(answer) == ["a", "bc", "d"]

    run_with_app(scenario)


WORDY = TextLogprobs(b"x", -1.0, [(b"x", -1.0)] * 1000)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 1}, "logprobs"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        ("/generate", {"prompt": "hi", "logprobs": 1}, "logprobs"),
    ],
)
def test_a_whole_answer_with_too_many_log_probabilities_is_refused(
    route: str, fields: dict[str, Any], param: str
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **fields)
        uid = (await app.worker.receive()).uid
        for _ in range(1100):
            app.worker.send(UserReply(uid, "x", logprobs=[WORDY]))
        assert await app.worker.receive() == AbortMsg(uid)
        await call.done
        assert_is_error(call, 400, code="too_many_logprobs", param=param)

    run_with_app(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_with_too_many_log_probabilities_are_refused_together(stream: bool) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b", "c"], echo=True, logprobs=1, stream=stream)
        uids = [(await app.worker.receive()).uid for _ in range(3)]
        for uid in uids[:2]:
            app.worker.send(UserReply(uid, "x", prompt_logprobs=[WORDY] * 600))
        assert [await app.worker.receive() for _ in uids] == [AbortMsg(uid) for uid in uids]
        await call.done
        assert_is_error(call, 400, code="too_many_logprobs", param="logprobs")

    run_with_app(scenario)


_DIALECT = Dialect(TOOL_FORMATS["hermes"](""), REASONING_FORMATS["qwen3"])
_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "'


def _builder(route: str, **fields: Any) -> AnswerBuilder:
    """Of answers that may reason, and must call the tool `f` if there are tools."""
    has_tools = "tool_choice" in fields
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
    match route:
        case "/v1/messages":
            body = {**BODIES[CHAT], "max_tokens": 9, **fields}
            return MessagesBuilder("m", MessagesRequest.model_validate(body), _DIALECT)
        case "/v1/completions":
            text_request = CompletionRequest.model_validate({**BODIES[TEXT], **fields})
            return CompletionBuilder("m", text_request, [""])
        case "/v1/chat/completions":
            tools = [{"type": "function", "function": function}] if has_tools else []
            chat_request = ChatRequest.model_validate({**BODIES[CHAT], "tools": tools, **fields})
            return ChatBuilder("m", chat_request, _DIALECT)
    tools = [{"type": "function", **function}] if has_tools else []
    request = ResponsesRequest.model_validate({**BODIES[RESPONSES], "tools": tools, **fields})
    return ResponsesBuilder("m", request, SamplingParams(), _DIALECT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "begin", "fields"),
    [
        (CHAT, "a", {}),
        (CHAT, "<think>a", {}),
        (CHAT, _CALL, {"tool_choice": "required"}),
        (TEXT, "a", {}),
        (RESPONSES, "a", {}),
        (RESPONSES, "<think>a", {}),
        (RESPONSES, _CALL, {"tool_choice": "required"}),
        ("/v1/messages", "a", {}),
        ("/v1/messages", "<think>a", {}),
    ],
)
def test_a_token_does_not_copy_the_answer_before_it(
    route: str, begin: str, fields: dict[str, Any], stream: bool
) -> None:
    size = 2**20

    async def scenario() -> int:
        builder = _builder(route, stream=stream, **fields)
        generation = Generation(lambda _: None, [0])

        async def read() -> None:
            while stream and not generation.has_ended:
                await generation.wait_for_more(lambda: None)
                builder.read_events(generation)
            await builder.read_to_end(generation)

        async def deliver(reply: UserReply) -> None:
            generation.put(reply)
            for _ in range(3):
                await asyncio.sleep(0)

        reading = asyncio.create_task(read())
        await deliver(UserReply(0, begin + size * "a", num_output=1))
        num_copies = 0
        for number in range(2, 34):
            tracemalloc.reset_peak()
            num_bytes, _ = tracemalloc.get_traced_memory()
            await deliver(UserReply(0, "a", num_output=number))
            assert not generation.has_unread
            num_copies += tracemalloc.get_traced_memory()[1] - num_bytes > size // 8
        await deliver(UserReply(0, finish="length", num_output=33))
        await reading
        return num_copies

    tracemalloc.start()
    try:
        assert asyncio.run(scenario()) <= 1, "the buffer may grow once"
    finally:
        tracemalloc.stop()
