"""/v1/responses over a real frontend.

OpenAI's types and client know its shape, `replay` what its events come to.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import (
    CodecReply,
    Conversation,
    EncodeMsg,
    ReplyError,
    TextLogprobs,
    TokenizeMsg,
    UserReply,
    pack_ids,
)
from minisgl.server.generation import Generation
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.responses import ResponsesBuilder
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.deltas import (
    ContentDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from minisgl.server.parsing.tool_formats import TOOL_FORMATS
from minisgl.server.requests.validation import IgnoredField, RequestBounds, RequestContext
from tests.server.harness import (
    MODEL,
    RESPONSES,
    App,
    HttpCall,
    answer_in_pieces,
    assert_is_error,
    run,
    run_with_app,
    token_replies,
    wait_until,
)

READS_THOUGHTS_AND_CALLS = Dialect(TOOL_FORMATS["hermes"](""), REASONING_FORMATS["qwen3"])
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE = (
    ["output_item.added", "content_part.added"],
    ["output_text.done", "content_part.done", "output_item.done"],
)
REASONING = MESSAGE[0], ["reasoning_text.done", *MESSAGE[1][1:]]
CALL = ["output_item.added"], ["function_call_arguments.done", "output_item.done"]


def read(**fields: Any) -> ResponsesRequest:
    """The request as it comes over the wire: through JSON."""
    return ResponsesRequest.model_validate(
        json.loads(json.dumps({"model": "m", "input": "hi", **fields}))
    )


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event, of OpenAI's types and numbered. Every byte belongs to an event."""
    assert re.fullmatch(r"(event: [^\n]+\ndata: [^\n]+\n\n)*", text)
    parts = [event.split("\n", 1) for event in text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name.removeprefix("event: ") for name, _ in parts] == [
        event["type"] for event in events
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    return events


def replay(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items as the events tell of them; what is done is what the pieces came to."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert all(item["status"] == "completed" for item in items), "one after the other"
            items.append(event["item"])
        elif "output_index" in event:
            assert event["output_index"] == len(items) - 1
            item = items[-1]
            if kind == "output_item.done":
                assert event["item"] == {**item, "status": event["item"]["status"]}
                items[-1] = event["item"]
                continue
            assert event["item_id"] == item["id"]
            if kind == "content_part.added":
                assert event["content_index"] == len(item["content"])
                item["content"].append(event["part"])
            elif kind == "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            elif kind == "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            elif kind == "function_call_arguments.done":
                assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
            else:
                part = item["content"][event["content_index"]]
                assert kind.split(".")[0] == part["type"]
                if kind.endswith(".delta"):
                    part["text"] += event["delta"]
                    part.get("logprobs", []).extend(event.get("logprobs", []))
                else:
                    assert (event["text"], event.get("logprobs")) == (
                        part["text"],
                        part.get("logprobs"),
                    )
    return items


def types_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


class ScriptedParser(OutputParser):
    """Parses the i-th list of deltas from the i-th reply, whatever its text."""

    def __init__(self, deltas_of_replies: list[list[Delta]]) -> None:
        self._deltas_of_replies = iter(deltas_of_replies)

    def feed(self, text: str, *, is_last: bool) -> list[Delta]:
        return next(self._deltas_of_replies)


def builder_of(
    deltas: list[list[Delta]], *, finish: Any = "stop", logprobs: bool = False, **fields: Any
) -> Any:
    """A builder that parses these deltas, and a generation with a reply for each list."""
    request = read(**fields)
    dialect = SimpleNamespace(parser_maker=lambda _, eager: lambda: ScriptedParser(deltas))
    builder = ResponsesBuilder("m", request, request.sampling({}), cast(Any, dialect))
    replies = []
    for i in range(1, len(deltas) + 1):
        tokens = [TextLogprobs(f"t{i}".encode(), -i, [])] if logprobs else []
        end = finish if i == len(deltas) else None
        replies.append(UserReply(0, finish=end, logprobs=tokens, num_prompt=3, num_output=i))
    return builder, PacedGeneration(replies)


class PacedGeneration(Generation):
    """Gets a reply whenever the one before is read, so that none are joined."""

    def __init__(self, replies: list[UserReply]) -> None:
        super().__init__(cast(Any, None), [0])
        self._to_come = iter(replies)

    def put_next(self) -> None:
        self.put(next(self._to_come))

    async def next(self) -> tuple[int, UserReply]:
        self.put_next()
        return await super().next()


def whole_of(deltas: list[list[Delta]], **options: Any) -> dict[str, Any]:
    async def collect() -> Any:
        builder, generation = builder_of(deltas, **options)
        await builder.read_to_end(generation)
        return builder.build()

    response = run(collect())
    Response.model_validate(response, strict=True)
    return cast(dict[str, Any], response)


def stream_of(deltas: list[list[Delta]], **options: Any) -> list[dict[str, Any]]:
    async def collect() -> bytes:
        builder, generation = builder_of(deltas, **options)
        parts = [builder.begin_stream(generation)]
        while not generation.has_ended:
            generation.put_next()
            parts.append(builder.read_events(generation))
        return b"".join([*parts, builder.end_stream()])

    return events_of(run(collect()).decode())


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Without the ids and times, which no two answers share."""
    text = json.dumps({**response, "created_at": 0, "completed_at": bool(response["completed_at"])})
    return cast(dict[str, Any], json.loads(text.replace(response["id"].removeprefix("resp_"), "")))


@asynccontextmanager
async def client_of(app: App) -> AsyncIterator[AsyncOpenAI]:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app.app))
    async with AsyncOpenAI(
        base_url="http://test/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


async def post(app: App, **fields: Any) -> HttpCall:
    call = app.post(RESPONSES, **fields)
    await call.done
    return call


def test_a_whole_answer_is_openais_object() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("Hel", "", "lo 👍", num_prompt=5, num_cached=4))
        call = await post(app)
        assert call.status == 200
        answer = json.loads(call.body)
        Response.model_validate(answer, strict=True)
        text = {"type": "output_text", "text": "Hello 👍", "annotations": [], "logprobs": []}
        message = {
            "type": "message",
            "id": "msg_0",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
        assert answer["id"].startswith("resp_")
        assert answer["completed_at"] >= answer["created_at"]
        assert anonymous(answer) == {
            "id": "resp_",
            "object": "response",
            "created_at": 0,
            "completed_at": True,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "model": "m",
            "output": [message],
            "usage": {
                "input_tokens": 5,
                "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 8,
            },
            "background": False,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": MODEL.sampling_defaults["temperature"],
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "user": None,
        }

    run_with_app(scenario)


def test_a_response_says_what_was_asked() -> None:
    asked = {
        "instructions": "be brief",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.75,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "tool_choice": "none",
        "top_logprobs": 2,
    }
    response = whole_of([[ContentDelta("x")]], include=["message.output_text.logprobs"], **asked)
    assert {name: response[name] for name in asked} == asked
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    response = whole_of([[ContentDelta("{}")]], text={"format": schema})
    assert response["text"]["format"] == {**schema, "description": None}


def test_a_stream_tells_of_a_message_from_beginning_to_end() -> None:
    async def scenario(app: App) -> None:
        call = app.post(RESPONSES, stream=True)
        await answer_in_pieces(app.worker, call, "Hé", "", "\n\nline\r\u2028")
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = events_of(call.body.decode())
        begin, end = MESSAGE
        deltas = ["output_text.delta", "output_text.delta"]
        assert types_of(events) == ["created", "in_progress", *begin, *deltas, *end, "completed"]
        for event in events[:2]:
            assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
            assert event["response"]["usage"] is None
        (message,) = replay(events)
        assert message["content"][0]["text"] == "Hé\n\nline\r\u2028"
        assert events[-1]["response"]["output"] == [message]
        assert events[-1]["response"]["usage"]["total_tokens"] == 6

    run_with_app(scenario)


def test_a_first_piece_is_sent_before_the_second_is_made() -> None:
    async def scenario(app: App) -> None:
        call = app.post(RESPONSES, stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "first"))
        await wait_until(lambda: b"first" in call.body)
        app.worker.send(UserReply(uid, "second", finish="stop"))
        await call.done
        assert replay(events_of(call.body.decode()))[0]["content"][0]["text"] == "firstsecond"

    run_with_app(scenario)


DELTAS: dict[str, tuple[list[list[Delta]], list[str]]] = {
    "nothing": ([[]], [*MESSAGE[0], "output_text.delta", *MESSAGE[1]]),
    "reasoning, then text": (
        [[ReasoningDelta("hm")], [ReasoningDelta("m"), ContentDelta("a")], [ContentDelta("b")]],
        [
            *REASONING[0],
            *["reasoning_text.delta"] * 2,
            *REASONING[1],
            *MESSAGE[0],
            *["output_text.delta"] * 2,
            *MESSAGE[1],
        ],
    ),
    "text, then two calls": (
        [
            [ContentDelta("so:")],
            [ToolCallStart(0, "c0", "f"), ToolCallArguments(0, '{"a"')],
            [ToolCallArguments(0, ":1}"), ToolCallStart(1, "c1", "g"), ToolCallArguments(1, "{}")],
            [],
        ],
        [
            *[*MESSAGE[0], "output_text.delta", *MESSAGE[1]],
            *[*CALL[0], *["function_call_arguments.delta"] * 2, *CALL[1]],
            *[*CALL[0], "function_call_arguments.delta", *CALL[1]],
        ],
    ),
    "only a call, without arguments": ([[ToolCallStart(0, "c0", "f")]], [*CALL[0], *CALL[1]]),
}


@pytest.mark.parametrize("name", DELTAS)
def test_items_follow_each_other_as_they_were_said(name: str) -> None:
    deltas, kinds = DELTAS[name]
    events = stream_of(deltas)
    assert types_of(events) == ["created", "in_progress", *kinds, "completed"]
    assert replay(events) == events[-1]["response"]["output"]


def test_calls_and_reasoning_have_openais_shape() -> None:
    reasoning, message, first, second = whole_of(
        [[ReasoningDelta("hm")], *DELTAS["text, then two calls"][0]]
    )["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "so:"
    assert {**first, "id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "c0",
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert (second["call_id"], second["arguments"]) == ("c1", "{}")
    prefixes = [item["id"].split("_")[0] for item in (reasoning, message, first, second)]
    assert prefixes == ["rs", "msg", "fc", "fc"]
    assert len({item["id"] for item in (reasoning, message, first, second)}) == 4


_PIECES = st.sampled_from(["text", "reasoning", "call", "arguments"])


def _deltas_of(pieces: list[list[str]]) -> list[list[Delta]]:
    """Arguments only where a call has just been."""
    count = itertools.count()
    last = ""
    deltas: list[list[Delta]] = []
    for step in pieces:
        deltas.append([])
        for piece in step:
            i = next(count)
            if piece == "arguments" and last not in ("call", "arguments"):
                continue
            last = piece
            kinds: dict[str, Callable[[], Delta]] = {
                "text": lambda i=i: ContentDelta(f"<{i}>"),
                "reasoning": lambda i=i: ReasoningDelta(f"({i})"),
                "call": lambda i=i: ToolCallStart(0, f"call{i}", "f"),
                "arguments": lambda i=i: ToolCallArguments(0, f"[{i}]"),
            }
            deltas[-1].append(kinds[piece]())
    return deltas


@settings(deadline=None)
@given(
    st.lists(st.lists(_PIECES, max_size=3), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
def test_a_stream_comes_to_the_whole_answer(
    pieces: list[list[str]], logprobs: bool, finish: str
) -> None:
    options: dict[str, Any] = {"finish": finish, "logprobs": logprobs}
    events = stream_of(_deltas_of(pieces), **options)
    whole = whole_of(_deltas_of(pieces), **options)
    last = events[-1]["response"]
    assert replay(events) == last["output"]
    assert anonymous(last) == anonymous(whole)
    texts = "".join(part["text"] for item in last["output"] for part in item.get("content", []))
    texts += "".join(
        item["arguments"] for item in last["output"] if item["type"] == "function_call"
    )
    deltas = [
        delta
        for step in _deltas_of(pieces)
        for delta in step
        if not isinstance(delta, ToolCallStart)
    ]
    assert sorted(texts) == sorted("".join(delta.text for delta in deltas))


def test_usage_counts_the_tokens_of_an_answer() -> None:
    usage = whole_of([[ContentDelta("a")], [], [ContentDelta("b")]])["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 3, 6)


THOUGHT = ["<thi", "nk>", "\n", "Hm", "", "é.", "</th", "ink>"]


@pytest.mark.parametrize(
    ("pieces", "num_reasoning"),
    [
        ([*THOUGHT, "\n\n", "", "Yes", "."], 8),
        ([*THOUGHT, "<tool_call>", '{"name": "get", ', '"arguments": {}}', "</tool_call>"], 8),
        ([*THOUGHT, "<tool_call>", '{"name": "get", ', '"arguments": {]'], 8),
        (["<think>Hm.</think>Yes, yes, yes.", "."], 1),
        (["<think>", "Hm", "."], 3),
        (["<thi", "s>"], 0),
        (["Yes", "."], 0),
    ],
)
def test_reasoning_is_counted_up_to_its_end_whatever_follows(
    pieces: list[str], num_reasoning: int
) -> None:
    tools: Any = [{"type": "function", "name": "get", "parameters": None, "strict": False}]

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies(*pieces))
        async with client_of(app) as client:
            whole = await client.responses.create(model="m", input="hi", tools=tools)
            async with client.responses.stream(model="m", input="hi", tools=tools) as stream:
                streamed = await stream.get_final_response()
        for usage in (whole.usage, streamed.usage):
            assert usage is not None
            assert usage.output_tokens == len(pieces)
            assert usage.output_tokens_details.reasoning_tokens == num_reasoning

    run_with_app(scenario, model=replace(MODEL, dialect=READS_THOUGHTS_AND_CALLS))


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("abort", "incomplete", None),
    ],
)
def test_an_end_is_told_of_the_response_and_of_its_last_item(
    finish: str, status: str, details: Any
) -> None:
    response = whole_of([[ReasoningDelta("a")], [ContentDelta("b")]], finish=finish)
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert [item["status"] for item in response["output"]] == ["completed", status]
    assert (response["completed_at"] is None) == (status == "incomplete")
    assert stream_of([[ContentDelta("b")]], finish=finish)[-1]["type"] == f"response.{status}"


def fail_after(part: str, fail: Callable[[App, int], None]) -> list[dict[str, Any]]:
    """The events of a stream that deltas something before it failed."""
    events: list[dict[str, Any]] = []

    async def scenario(app: App) -> None:
        call = app.post(RESPONSES, stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, part))
        await wait_until(lambda: part.encode() in call.body)
        fail(app, uid)
        await call.done
        assert call.status == 200
        events.extend(events_of(call.body.decode()))

    run_with_app(scenario)
    return events


def test_an_engine_that_dies_in_mid_stream_fails_the_response() -> None:
    *_, error, failed = fail_after("part", lambda app, _: app.frontend.fail("the engine is gone"))
    assert {**error, "sequence_number": 0} == {
        "type": "error",
        "code": "engine_failed",
        "message": "the engine is gone",
        "param": None,
        "sequence_number": 0,
    }
    response = failed["response"]
    assert (failed["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "the engine is gone"}
    (message,) = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "part")


def test_a_refusal_in_mid_stream_fails_the_response() -> None:
    refusal = ReplyError(400, "no_grammar", "the grammar ran out", "text")
    *_, error, failed = fail_after(
        "part", lambda app, uid: app.worker.send(UserReply(uid, error=refusal))
    )
    assert (error["code"], error["param"]) == ("no_grammar", "text")
    assert failed["response"]["error"] == {
        "code": "invalid_prompt",
        "message": "the grammar ran out",
    }


def test_what_is_not_the_clients_fault_is_the_servers_error_of_the_response() -> None:
    failure = ReplyError(503, "out_of_memory", "the device's memory is full", None)
    *_, error, failed = fail_after(
        "part", lambda app, uid: app.worker.send(UserReply(uid, error=failure))
    )
    assert (error["code"], error["param"]) == ("out_of_memory", None)
    assert failed["response"]["error"] == {
        "code": "server_error",
        "message": "the device's memory is full",
    }


def test_the_log_probabilities_of_a_call_are_not_those_of_the_text_behind_it() -> None:
    deltas: list[list[Delta]] = [
        [ToolCallStart(0, "c", "f")],
        [ToolCallArguments(0, "{}")],
        [ContentDelta("x")],
    ]
    response = whole_of(deltas, logprobs=True, include=["message.output_text.logprobs"])
    assert [token["token"] for token in response["output"][1]["content"][0]["logprobs"]] == ["t3"]


def with_logprobs(msg: TokenizeMsg) -> list[UserReply]:
    def entry(token: bytes, start: int) -> TextLogprobs:
        return TextLogprobs(token, -0.5, [(token, -0.5), (b"z", -1.0)], start)

    return [
        UserReply(msg.uid, "a", logprobs=[entry(b"a", 0)], num_output=1),
        UserReply(msg.uid, "", logprobs=[entry(b"\xc3", 1)], num_output=2),
        UserReply(msg.uid, "é", logprobs=[entry(b"\xa9", 1)], num_output=3),
        UserReply(msg.uid, "", logprobs=[entry(b"</s>", 2)], num_output=4, finish="stop"),
    ]


def test_log_probabilities_stand_with_the_text_that_they_are_of() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(with_logprobs)
        asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = json.loads((await post(app, **asked)).body)
        events = events_of((await post(app, stream=True, **asked)).body.decode())
        Response.model_validate(whole, strict=True)
        (part,) = whole["output"][0]["content"]
        assert [token["token"] for token in part["logprobs"]] == ["a", "\ufffd", "\ufffd", "</s>"]
        assert part["logprobs"][0] == {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "z", "logprob": -1.0, "bytes": [122]},
            ],
        }
        assert [token["bytes"] for token in part["logprobs"][1:3]] == [[0xC3], [0xA9]]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [(event["delta"], len(event["logprobs"])) for event in deltas] == [
            ("a", 1),
            ("é", 2),
            ("", 1),
        ]
        assert replay(events)[0]["content"] == [part]

    run_with_app(scenario)


THOUGHT = ["<think>", "hm", "</think>"]
CALLING = [
    *("<tool_call>", "\n", '{"name": "get", "arg', 'uments": {"x', '": 1', "}", "}", "\n"),
    *("</tool_call>", "\n"),
]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*THOUGHT, "\n\n", "ans", "wer"], [["ans", "wer", "</s>"]]),
        ([*THOUGHT, " answer"], [[" answer", "</s>"]]),
        (["a", " ", *CALLING, "b", "c"], [["a"], ["b", "c", "</s>"]]),
        ([*THOUGHT, "a", *CALLING, *CALLING], [["a"]]),
        (["a", *CALLING, " b", *CALLING, "c <", "\n"], [["a"], [" b"], ["c <", "\n", "</s>"]]),
        (["a", "<tool_call>", "\n", "b"], [["a", "<tool_call>", "\n", "b", "</s>"]]),
        ([*THOUGHT, "\n\n"], [["</s>"]]),
    ],
)
def test_a_message_has_the_log_probabilities_of_its_tokens_and_no_others(
    tokens: list[str], expected: list[list[str]]
) -> None:
    """Not those of markers. In a stream calls are read otherwise, and it has the same."""
    for said in logprobs_of_messages(tokens):
        assert said == expected


def test_a_call_that_is_left_out_has_its_log_probabilities_in_no_message() -> None:
    tokens = ["a", *CALLING, " b", *CALLING, "c"]
    for said in logprobs_of_messages(tokens, parallel_tool_calls=False):
        assert said == [["a"], [" b", "c", "</s>"]]


def logprobs_of_messages(tokens: list[str], **fields: Any) -> list[list[list[str]]]:
    """The tokens with log probabilities that each message has: whole, and as a stream."""
    outputs: list[Any] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        replies = []
        start = 0
        for token in tokens:
            logprobs = [TextLogprobs(token.encode(), -0.5, [], start)]
            replies.append(UserReply(msg.uid, token, logprobs=logprobs))
            start += len(token)
        end = [TextLogprobs(b"</s>", -0.5, [], start)]
        return [*replies, UserReply(msg.uid, logprobs=end, finish="stop")]

    async def scenario(app: App) -> None:
        app.worker.answer_with(script)
        asked: dict[str, Any] = {
            "include": ["message.output_text.logprobs"],
            "tools": [{"type": "function", "name": "get", "parameters": None, "strict": None}],
            **fields,
        }
        outputs.append(json.loads((await post(app, **asked)).body)["output"])
        stream = await post(app, stream=True, **asked)
        outputs.append(replay(events_of(stream.body.decode())))

    dialect = Dialect(TOOL_FORMATS["hermes"](""), REASONING_FORMATS["qwen3"])
    run_with_app(scenario, model=replace(MODEL, dialect=dialect))
    parts = [
        [item["content"][0] for item in output if item["type"] == "message"] for output in outputs
    ]
    return [
        [[token["token"] for token in part["logprobs"]] for part in its_parts]
        for its_parts in parts
    ]


def test_only_messages_have_log_probabilities() -> None:
    deltas: list[list[Delta]] = [
        [ReasoningDelta("a")],
        [],
        [ContentDelta("b")],
        [ToolCallStart(0, "c", "f")],
        [ToolCallArguments(0, "{}")],
    ]
    _, message, _ = whole_of(deltas, logprobs=True)["output"]
    assert [token["token"] for token in message["content"][0]["logprobs"]] == ["t2", "t3"]


def test_openais_client_reads_whole_answers_and_streams() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("Hel", "lo"))
        async with client_of(app) as client:
            whole = await client.responses.create(model="m", input="hi")
            assert (whole.output_text, whole.status) == ("Hello", "completed")
            async with client.responses.stream(model="m", input="hi") as stream:
                snapshots = [
                    event.snapshot
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
                final = await stream.get_final_response()
            assert snapshots[-1] == "Hello"
            assert all("Hello".startswith(snapshot) for snapshot in snapshots)
            assert final.output_text == "Hello"
            events = [
                event
                async for event in await client.responses.create(model="m", input="hi", stream=True)
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))

    run_with_app(scenario)


def test_openais_client_counts_the_tokens_of_an_input() -> None:
    async def scenario(app: App) -> None:
        async with client_of(app) as client:
            counting = asyncio.create_task(
                client.responses.input_tokens.count(model="m", input="hi", instructions="be brief")
            )
            msg = await app.worker.receive()
            assert isinstance(msg, EncodeMsg)
            assert isinstance(msg.prompt, Conversation)
            assert [turn["role"] for turn in msg.prompt.messages] == ["system", "user"]
            app.worker.send_message(CodecReply(msg.uid, ids=pack_ids([1, 2, 3])))
            assert (await counting).to_dict() == {
                "object": "response.input_tokens",
                "input_tokens": 3,
            }
            with pytest.raises(openai.BadRequestError, match="personality: it is not supported"):
                await client.responses.input_tokens.count(
                    model="m", input="hi", personality="friendly"
                )

    run_with_app(scenario)


def test_nothing_is_compacted() -> None:
    async def scenario(app: App) -> None:
        async with client_of(app) as client:
            with pytest.raises(openai.NotFoundError, match="this server compacts no conversations"):
                await client.responses.compact(model="m", input="hi")

    run_with_app(scenario)


class Point(BaseModel):
    x: int
    y: int


def test_openais_client_parses_into_its_own_classes() -> None:
    grammars: list[Grammar | None] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        grammars.append(msg.sampling.grammar)
        return [
            UserReply(msg.uid, '{"x":1,', num_output=1),
            UserReply(msg.uid, '"y":2}', finish="stop", num_output=2),
        ]

    async def scenario(app: App) -> None:
        app.worker.answer_with(script)
        async with client_of(app) as client:
            parsed = await client.responses.parse(model="m", input="hi", text_format=Point)
            assert parsed.output_parsed == Point(x=1, y=2)
            async with client.responses.stream(model="m", input="hi", text_format=Point) as stream:
                assert (await stream.get_final_response()).output_parsed == Point(x=1, y=2)
        for grammar in grammars:
            assert grammar is not None
            assert grammar.kind == "json_schema"
            assert set(json.loads(grammar.text)["properties"]) == {"x", "y"}

    run_with_app(scenario)


def test_the_items_of_an_answer_are_input_of_the_next_request() -> None:
    deltas: list[list[Delta]] = [
        [ReasoningDelta("hm"), ContentDelta("so:")],
        [ToolCallStart(0, "c0", "f"), ToolCallArguments(0, "{}")],
    ]
    output = Response.model_validate(whole_of(deltas)).output
    items = [
        {"role": "user", "content": "hi"},
        *(item.model_dump(mode="json", exclude_unset=True) for item in output),
    ]
    result = {"type": "function_call_output", "call_id": "c0", "output": "42"}
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert read(input=[*items, result]).chat_messages() == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so:", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c0", "content": "42"},
    ]


def _call(i: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}


def _called(*numbers: int) -> list[dict[str, Any]]:
    return [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": {}}}
        for i in numbers
    ]


USER = {"role": "user", "content": "q"}
SPOKEN = {"role": "assistant", "content": "a"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "t"}],
}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ("", [{"role": "user", "content": ""}]),
        ([USER], [USER]),
        ([{"type": "message", **USER, "status": "completed", "id": "msg_1"}], [USER]),
        ([{"role": "developer", "content": "d"}, USER], [{"role": "system", "content": "d"}, USER]),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_text", "text": "b"},
                    ],
                }
            ],
            [{"role": "user", "content": "ab"}],
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, USER],
            [SPOKEN, USER],
        ),
        (
            [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "Hm, ", "annotations": []},
                        {"type": "refusal", "refusal": "no"},
                    ],
                }
            ],
            [{"role": "assistant", "content": "Hm, no"}],
        ),
        ([USER, SPOKEN, SPOKEN, USER], [USER, SPOKEN, SPOKEN, USER]),
        ([_call(0), _call(1)], [{"role": "assistant", "content": "", "tool_calls": _called(0, 1)}]),
        ([SPOKEN, _call(0)], [{**SPOKEN, "tool_calls": _called(0)}]),
        (
            [_call(0), SPOKEN],
            [{"role": "assistant", "content": "", "tool_calls": _called(0)}, SPOKEN],
        ),
        ([THOUGHT, SPOKEN], [{**SPOKEN, "reasoning_content": "t"}]),
        ([SPOKEN, THOUGHT, SPOKEN], [SPOKEN, {**SPOKEN, "reasoning_content": "t"}]),
        (
            [
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "r"}],
                }
            ],
            [{"role": "tool", "tool_call_id": "c", "content": "r"}],
        ),
    ],
)
def test_items_are_messages_of_a_chat(items: Any, messages: Any) -> None:
    assert read(input=items).chat_messages() == messages


@pytest.mark.parametrize("phase", [None, "commentary", "final_answer"])
def test_a_phase_comes_back_with_its_message(phase: str | None) -> None:
    """Clients send back what they got; a template has no place for it."""
    spoken = {"type": "message", "id": "msg_1", "status": "completed", **SPOKEN, "phase": phase}
    assert read(input=[USER, spoken, USER]).chat_messages() == [USER, SPOKEN, USER]


def test_instructions_come_first_and_variables_go_along() -> None:
    (prompt,) = read(
        instructions="be brief", chat_template_kwargs={"enable_thinking": False}
    ).prompts()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert prompt == Conversation(messages, {}, {"enable_thinking": False})


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0, "top_k": -1, "seed": 3, "stop": "x", "logit_bias": {"5": 1}}]
)
def test_parameters_go_the_way_of_chats(fields: dict[str, Any]) -> None:
    defaults = {"temperature": 0.25, "top_k": 7}
    chat = ChatRequest.model_validate({"model": "m", "messages": [USER], "max_tokens": 5, **fields})
    request = read(max_output_tokens=5, **fields)
    assert request.sampling(defaults) == chat.sampling(defaults)
    assert read(**fields).sampling({}).max_tokens is None
    assert request.num_answers == 1


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
        (
            {"type": "json_schema", "name": "n", "schema": {"a": [1]}},
            Grammar("json_schema", '{"a": [1]}'),
        ),
    ],
)
def test_a_format_is_a_grammar(form: Any, grammar: Any) -> None:
    assert read(text={"format": form}).sampling({}) == SamplingParams(grammar=grammar)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"include": []}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
    ],
)
def test_how_many_log_probabilities(fields: dict[str, Any], expected: int | None) -> None:
    assert read(**fields).sampling({}).logprobs == expected


NEUTRAL: dict[str, list[Any]] = {
    "background": [False],
    "client_metadata": [{"a": "b"}],
    "include": [[], ["reasoning.encrypted_content"]],
    "metadata": [{"a": "b"}],
    "parallel_tool_calls": [True, False],
    "prompt_cache_key": ["k"],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "reasoning": [
        {},
        {"effort": None, "summary": "auto"},
        {"mode": "standard", "context": "auto"},
        {"mode": None, "context": "all_turns"},
    ],
    "safety_identifier": ["s"],
    "service_tier": ["flex"],
    "store": [True, False],
    "text": [{}, {"format": {"type": "text"}}, {"verbosity": "medium"}],
    "tool_choice": ["auto", "none"],
    "tools": [[]],
    "truncation": ["disabled"],
    "user": ["u"],
    "previous_response_id": [],
    "conversation": [],
    "prompt": [],
    "max_tool_calls": [],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in NEUTRAL.items() for value in [None, *values]],
)
def test_a_value_that_changes_nothing_is_accepted(name: str, value: Any) -> None:
    request = read(**{name: value})
    assert (request.prompts(), request.sampling({})) == (read().prompts(), read().sampling({}))


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
        ("high", {"reasoning_effort": "high", "enable_thinking": True}),
    ],
)
def test_an_effort_is_the_switch_of_the_template(effort: str, expected: dict[str, Any]) -> None:
    request = read(reasoning={"effort": effort})
    assert request.template_variables == expected
    assert request.allows_reasoning is (effort != "none")
    own = read(reasoning={"effort": effort}, chat_template_kwargs={"enable_thinking": True})
    assert own.template_variables["enable_thinking"] is True


def test_an_effort_that_no_template_reads_is_noted_as_ignored() -> None:
    context = RequestContext(RequestBounds(has_reasoning_switch=False))
    body = {"model": "m", "input": "hi", "reasoning": {"effort": "low"}}
    ResponsesRequest.model_validate(body, context=context)
    assert context.ignored_fields == {IgnoredField("ResponsesRequest", "'reasoning_effort'")}


def test_reasoning_that_only_its_maker_reads_is_skipped() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    (prompt,) = read(input=[reasoning, {"role": "user", "content": "hi"}]).prompts()
    assert prompt == read().prompts()[0]


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"instructions": "\0"}, "instructions"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "\0"}]}]},
            "input.0.content.0.text",
        ),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input.1"),
        ({"input": [{"type": ["message"], **USER}]}, "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
                ]
            },
            "input.0.content.0.type",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"input": "\ud83d"}, "input"),
        ({"instructions": "\ud83d"}, "instructions"),
        ({"user": "\ud83d"}, "user"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def scenario(app: App) -> None:
        call = await post(app, **fields)
        error = assert_is_error(call, 400, type="invalid_request_error", param=param)
        assert param in error["message"]

    run_with_app(scenario)


def test_an_input_must_be() -> None:
    with pytest.raises(ValidationError, match="input"):
        ResponsesRequest.model_validate({"model": "m"})


FLAT = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": True,
}
NESTED = {
    "type": "function",
    "function": {name: value for name, value in FLAT.items() if name != "type"},
}


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
@pytest.mark.parametrize("parallel", [None, True, False])
def test_flat_tools_are_used_as_chats_are(choice: Any, chats: Any, parallel: bool | None) -> None:
    flat = read(tools=[FLAT], tool_choice=choice, parallel_tool_calls=parallel)
    common = {"model": "m", "messages": [USER], "parallel_tool_calls": parallel}
    chat = ChatRequest.model_validate({**common, "tools": [NESTED], "tool_choice": chats})
    uses = [
        (use.choice, use.named_tool, use.is_parallel, use.for_template())
        for use in (flat.tool_use, chat.tool_use)
    ]
    assert uses[0] == uses[1]


def test_an_answer_with_tools_through_openais_client() -> None:
    tools: Any = [
        {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": False}
    ]
    reasoning = "<think>\nHm.\n</think>"
    call = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'
    output_text = f"{reasoning}\n\nSo.\n{call}"
    prompts: list[Any] = []

    def script(msg: TokenizeMsg) -> Iterable[UserReply]:
        prompts.append(msg.prompt)
        return token_replies(*(output_text[at : at + 3] for at in range(0, len(output_text), 3)))(
            msg
        )

    async def scenario(app: App) -> None:
        app.worker.answer_with(script)
        async with client_of(app) as client:
            whole = await client.responses.create(model="m", input="hi", tools=tools)
            async with client.responses.stream(model="m", input="hi", tools=tools) as stream:
                streamed = await stream.get_final_response()
        for output in (whole.output, streamed.output):
            assert [item.type for item in output] == ["reasoning", "message", "function_call"]
            reasoning, message, call = (item.to_dict() for item in output)
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
            assert cast(Any, message)["content"][0]["text"] == "So."
            assert (call["name"], call["arguments"]) == ("get", '{"x": 1}')
        assert prompts[0] == prompts[1]
        assert prompts[0].tools == read(tools=tools).tool_use.for_template()
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens > 0

    run_with_app(scenario, model=replace(MODEL, dialect=READS_THOUGHTS_AND_CALLS))


NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{**FLAT, "name": "get"}, {**FLAT, "name": "put", "description": None}],
}


def test_functions_of_a_namespace_are_shown_with_its_name_and_once_with_its_description() -> None:
    shown = read(tools=[FLAT, NAMESPACE]).tool_use.for_template()
    assert [tool["function"]["name"] for tool in shown] == ["f", "crm.get", "crm.put"]
    texts = [tool["function"].get("description") for tool in shown]
    assert texts == ["d", "Customers.\n\nd", None]


def test_arguments_of_a_call_are_streamed_as_they_come() -> None:
    spoken = '<tool_call>\n{"name": "f", "arguments": {"a": "' + "x" * 100 + '"}}\n</tool_call>'

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies(*spoken))
        events = events_of((await post(app, tools=[FLAT], stream=True)).body.decode())
        kinds = [event["type"] for event in events]
        assert kinds.count("response.function_call_arguments.delta") > 10

    run_with_app(scenario, model=replace(MODEL, dialect=Dialect(TOOL_FORMATS["hermes"](""))))


def test_a_call_of_a_namespace_has_two_names_in_answers_and_one_for_the_model() -> None:
    spoken = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        for name in ("crm.get", "f")
    )

    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies(spoken))
        tools = [FLAT, NAMESPACE]
        whole, stream = [
            json.loads((await post(app, tools=tools)).body),
            events_of((await post(app, tools=tools, stream=True)).body.decode()),
        ]
        assert whole["tools"][1] == {
            **NAMESPACE,
            "tools": [FLAT | {"name": "get"}, FLAT | {"name": "put", "description": None}],
        }
        for output in (whole["output"], replay(stream)):
            assert [(item["name"], item.get("namespace")) for item in output] == [
                ("get", "crm"),
                ("f", None),
            ]
            turn, *_ = read(input=output).chat_messages()
            assert [call["function"]["name"] for call in turn["tool_calls"]] == ["crm.get", "f"]

    run_with_app(scenario, model=replace(MODEL, dialect=Dialect(TOOL_FORMATS["hermes"](""))))


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([NAMESPACE, {**FLAT, "name": "crm.get"}], "tools"),
        ([NAMESPACE, NAMESPACE], "tools"),
        (
            [FLAT, {**NAMESPACE, "tools": [FLAT, {"type": "custom", "name": "c"}]}],
            "tools.1.tools.1.type",
        ),
        ([{**NAMESPACE, "name": "a b"}], "tools.0.name"),
        ([{"type": "web_search", "external_web_access": True}], "tools.0.type"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_by_place(tools: Any, param: str) -> None:
    async def scenario(app: App) -> None:
        assert_is_error(await post(app, tools=tools), 400, param=param)

    run_with_app(scenario)


def test_the_functions_of_namespaces_are_counted_with_the_others() -> None:
    many = [{**FLAT, "name": f"f{i}"} for i in range(128)]
    request = read(tools=[{**NAMESPACE, "tools": many}, FLAT])
    with pytest.raises(InvalidRequest, match="there may be 128 tools, got 129"):
        request.prompts()


def test_a_search_that_may_not_access_the_web_is_left_out_and_noted() -> None:
    """Codex offers it always: OpenAI searches an index of its own then."""
    context = RequestContext(RequestBounds())
    search = {"type": "web_search", "external_web_access": False}
    body = {"model": "m", "input": "hi", "tools": [search, FLAT]}
    request = ResponsesRequest.model_validate(body, context=context)
    assert request.tool_use.for_template() == read(tools=[FLAT]).tool_use.for_template()
    assert context.ignored_fields == {IgnoredField("ResponsesRequest", "'tools.web_search'")}


def test_a_forced_call_that_is_cut_off_is_an_incomplete_item() -> None:
    spoken = '<tool_call>\n{"name": "f", "arguments": {"x'

    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, spoken), UserReply(msg.uid, finish="length")]
        )
        whole, stream = [
            await post(app, tools=[FLAT], tool_choice="required", stream=stream)
            for stream in (False, True)
        ]
        for response in (json.loads(whole.body), events_of(stream.body.decode())[-1]["response"]):
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            (item,) = response["output"]
            assert (item["type"], item["status"]) == ("function_call", "incomplete")
            assert (item["name"], item["arguments"]) == ("f", '{"x')

    run_with_app(scenario, model=replace(MODEL, dialect=Dialect(TOOL_FORMATS["hermes"](""))))


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_kept(method: str) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        made = json.loads((await post(app, store=True)).body)
        call = app.call(method, f"{RESPONSES}/{made['id']}")
        await call.done
        error = assert_is_error(call, 404, param="response_id", code="response_not_found")
        assert "this server stores no responses" in error["message"]
        async with client_of(app) as client:
            with pytest.raises(openai.NotFoundError, match="stores no responses"):
                await (client.responses.retrieve if method == "GET" else client.responses.delete)(
                    "resp_1"
                )

    run_with_app(scenario)
