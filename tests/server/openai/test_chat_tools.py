"""Chats with tools and reasoning: whole, as events, and as OpenAI's client joins the events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, LengthFinishReasonError

from minisgl.message import TextLogprobs, TokenizeMsg, UserReply
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from minisgl.server.parsing.tool_calls import MAX_DEPTH
from minisgl.server.parsing.tool_formats import TOOL_FORMATS
from tests.server.harness import (
    CHAT,
    MODEL,
    App,
    Script,
    assert_is_error,
    events_of,
    run,
    running_app,
)

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get", "put")]
NAMED = {"type": "function", "function": {"name": "get"}}
CALLS = (
    '<tool_call>\n{"name": "get", "arguments": {"x": "é\\"}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nHm.\n</think>\n\n"
SPEAKER = replace(
    MODEL,
    dialect=Dialect(TOOL_FORMATS["hermes"](""), REASONING_FORMATS["qwen3"], {"<tool_call>": 7}),
)


def token_replies(text: str, finish: Any = "stop") -> Script:
    """A script that says a text three characters at a time, with log probabilities if asked."""

    def script(msg: TokenizeMsg) -> list[UserReply]:
        texts = [text[at : at + 3] for at in range(0, len(text), 3)]
        has_logprobs = msg.sampling.logprobs is not None
        pieces = [
            UserReply(
                msg.uid,
                piece,
                logprobs=[TextLogprobs(piece.encode(), -1.0, [])] if has_logprobs else [],
            )
            for piece in texts
        ]
        return [*pieces, UserReply(msg.uid, "", finish=finish)]

    return script


@asynccontextmanager
async def client_of(app: App) -> AsyncIterator[AsyncOpenAI]:
    transport = httpx.ASGITransport(app=app.app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        AsyncOpenAI(
            base_url="http://test/v1", api_key="x", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


def ask(text: str, finish: Any = "stop", model: Any = SPEAKER, **fields: Any) -> Any:
    """The only choice of a whole answer. OpenAI's client must make an equal one from the events."""
    choices: list[Any] = []

    async def scenario() -> None:
        async with running_app(model=model) as app, client_of(app) as client:
            app.worker.answer_with(token_replies(text, finish))
            call = app.post(CHAT, **{"tools": TOOLS, **fields})
            await call.done
            assert call.status == 200, call.body
            choices.append(json.loads(call.body)["choices"][0])
            asked: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
            async with client.chat.completions.stream(model="m", **asked) as stream:
                try:
                    streamed: Any = await stream.get_final_completion()
                except LengthFinishReasonError as error:
                    streamed = error.completion
                choices.append(streamed.choices[0].to_dict())

    run(scenario())
    whole, streamed = choices
    for number, call in enumerate(streamed["message"].get("tool_calls") or ()):
        assert call.pop("index") == number
        call["function"].pop("parsed_arguments", None)
        assert call.pop("id").startswith("call_")
    ids = [call.pop("id") for call in whole["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    both = [
        {name: value for name, value in choice["message"].items() if value is not None}
        for choice in choices
    ]
    assert both[0] == both[1]
    assert whole["finish_reason"] == streamed["finish_reason"]
    return whole


def called(choice: Any) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", ())
    assert all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


BOTH = [("get", '{"x": "é\\"}"}'), ("put", "{}")]


def test_an_answer_of_calls_has_no_content_and_says_why_it_ended() -> None:
    choice = ask(CALLS)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert called(choice) == BOTH
    assert set(choice["message"]) == {"role", "content", "refusal", "tool_calls"}


def test_log_probabilities_of_calls_make_no_content() -> None:
    choice = ask(CALLS, logprobs=True)
    assert choice["message"]["content"] is None
    assert called(choice) == BOTH
    assert "".join(token["token"] for token in choice["logprobs"]["content"]) == CALLS


def test_thoughts_content_and_calls_of_one_answer() -> None:
    choice = ask(f"{THOUGHT}Let me see.\n{CALLS}")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (
        "Hm.",
        "Let me see.",
    )
    assert called(choice) == BOTH
    assert choice["finish_reason"] == "tool_calls"


def test_an_answer_without_calls_is_plain() -> None:
    choice = ask("Just text.")
    assert choice["message"] == {"role": "assistant", "content": "Just text.", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "calls", "finish"),
    [
        ({"tool_choice": "required"}, BOTH, "tool_calls"),
        ({"parallel_tool_calls": False}, BOTH[:1], "tool_calls"),
        ({"tool_choice": NAMED}, BOTH[:1], "stop"),
    ],
    ids=str,
)
def test_a_choice_bounds_the_calls(fields: Any, calls: Any, finish: str) -> None:
    has_two_calls = len(calls) == 2 or "parallel_tool_calls" in fields
    choice = ask(CALLS if has_two_calls else CALLS.split("\n<tool_call>")[0], **fields)
    assert (called(choice), choice["finish_reason"]) == (calls, finish)


def test_if_none_is_to_be_called_calls_are_text() -> None:
    choice = ask(CALLS, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


def test_an_answer_that_is_too_long_says_so_even_if_it_called_tools() -> None:
    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            app.worker.answer_with(token_replies(CALLS + "\nAnd", "length"))
            call = app.post(CHAT, tools=TOOLS)
            await call.done
            (choice,) = json.loads(call.body)["choices"]
            assert (called(choice), choice["finish_reason"]) == (BOTH, "length")

    run(scenario())


def test_a_whole_answer_that_is_cut_in_a_call_has_it_as_text_and_a_stream_as_far_as_it_came() -> (
    None
):
    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            app.worker.answer_with(token_replies(CALLS[:50], "length"))
            whole = app.post(CHAT, tools=TOOLS)
            stream = app.post(CHAT, tools=TOOLS, stream=True)
            await whole.done
            await stream.done
            (choice,) = json.loads(whole.body)["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS[:50], "length")
            deltas = [event["choices"][0]["delta"] for event in events_of(stream)[:-1]]
            pieces = [
                call["function"]["arguments"]
                for delta in deltas
                for call in delta.get("tool_calls", ())
            ]
            assert all(delta.get("content") is None for delta in deltas)
            arguments = "".join(pieces)
            assert arguments
            assert CALLS[:50].endswith(arguments)

    run(scenario())


@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("at", [30, 45, 52])
def test_a_forced_call_that_is_cut_off_is_a_call_and_the_answer_says_that_it_was_cut(
    tool_choice: Any, finish: str, at: int
) -> None:
    choice = ask(CALLS[:at], finish, tool_choice=tool_choice)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, finish)
    ((name, arguments),) = called(choice)
    all_arguments = '{"x": "é\\"}"}'
    assert name == "get"
    assert all_arguments.startswith(arguments)
    assert arguments != all_arguments


def test_a_call_that_is_whole_is_all_that_is_said_if_the_answer_is_cut_in_its_closing_marker() -> (
    None
):
    end = CALLS.index("</tool_call>")
    for tool_choice in ("auto", "required"):
        choice = ask(CALLS[: end + 6], "length", tool_choice=tool_choice)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        assert called(choice) == BOTH[:1]


STRICT = [{**TOOLS[0], "function": {"name": "get", "strict": True}}]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tools", "choice"), [(TOOLS, "required"), (STRICT, "auto")])
def test_a_call_by_a_grammar_that_nests_too_deep_is_an_error_with_the_bound(
    path: str, stream: bool, tools: Any, choice: str
) -> None:
    """The schema lets the model go on, and no client could read the call."""
    depth = MAX_DEPTH + 1
    arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
    text = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
    fields: dict[str, Any] = {"tools": tools, "tool_choice": choice}
    if path == "/v1/responses":
        fields = {"tools": [{"type": "function", **tool["function"]} for tool in tools]}
        fields |= {"tool_choice": choice, "input": "hi"}
    if path == "/v1/messages":
        schema = {"input_schema": {"type": "object"}}
        fields["tools"] = [{**tool["function"], **schema} for tool in tools]
        fields["tool_choice"] = {"type": "any" if choice == "required" else "auto"}
        fields |= {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            app.worker.answer_with(token_replies(text))
            call = app.post(path, stream=stream, **fields)
            await call.done
            assert call.status == (200 if stream else 400)
            body = call.body.decode()
            assert f"nest more than {MAX_DEPTH} deep" in body
            assert '"tool_calls"}' not in body
            assert '"tool_use","stop' not in body
            metrics = app.call("GET", "/metrics")
            await metrics.done
            assert b'errors_total{code="arguments_too_deep"} 1.0' in metrics.body

    run(scenario())


def test_a_forced_answer_that_is_cut_before_the_name_says_nothing() -> None:
    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            app.worker.answer_with(token_replies(CALLS[:24], "length"))
            whole, stream = (
                app.post(CHAT, tools=TOOLS, tool_choice="required", stream=stream)
                for stream in (False, True)
            )
            await whole.done
            await stream.done
            (choice,) = json.loads(whole.body)["choices"]
            assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
            first, last = [event["choices"][0] for event in events_of(stream)[:-1]]
            assert first["delta"] == {"role": "assistant", "content": None}
            assert last["delta"] == {"content": ""}
            assert choice["finish_reason"] == last["finish_reason"] == "length"

    run(scenario())


@pytest.mark.parametrize(
    ("text", "content"),
    [("", ""), (THOUGHT, ""), (CALLS, None), ("Text.", "Text."), (f"Text.{CALLS}", "Text.")],
    ids=["nothing", "thoughts", "calls", "text", "text and calls"],
)
def test_the_content_of_a_stream_is_that_of_the_whole_answer(
    text: str, content: str | None
) -> None:
    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            app.worker.answer_with(token_replies(text))
            whole, stream = (app.post(CHAT, tools=TOOLS, stream=stream) for stream in (False, True))
            await whole.done
            await stream.done
            assert json.loads(whole.body)["choices"][0]["message"]["content"] == content
            choices = [event["choices"][0] for event in events_of(stream)[:-1]]
            contents = [choice["delta"].get("content") for choice in choices]
            said = [each for each in contents if each is not None]
            assert ("".join(said) if said else None) == content

    run(scenario())


def test_the_events_of_a_call() -> None:
    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            app.worker.answer_with(
                token_replies(
                    f'{THOUGHT}<tool_call>{{"name": "put", "arguments": {{"a": 1}}}}</tool_call>'
                )
            )
            call = app.post(CHAT, tools=TOOLS, stream=True)
            await call.done
            *events, done = events_of(call)
            first, *deltas, last = [event["choices"][0] for event in events]
            assert (first["delta"], done) == ({"role": "assistant", "content": None}, "[DONE]")
            assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
            assert (
                "".join(choice["delta"].pop("reasoning_content", "") for choice in deltas) == "Hm."
            )
            begin, *more = [
                choice["delta"]["tool_calls"][0] for choice in deltas if choice["delta"]
            ]
            assert begin.pop("id").startswith("call_")
            assert begin == {
                "index": 0,
                "type": "function",
                "function": {"name": "put", "arguments": ""},
            }
            assert all(call.keys() == {"index", "function"} for call in more)
            assert all(call["index"] == 0 for call in more)
            assert "".join(call["function"]["arguments"] for call in more) == '{"a": 1}'

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED}, True),
        ({"tools": [{"type": "function", "function": {"name": "get", "strict": True}}]}, True),
    ],
    ids=str,
)
def test_what_the_engine_and_the_template_are_told(fields: Any, has_grammar: bool) -> None:
    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            call = app.post(CHAT, **{"tools": TOOLS, **fields})
            msg = await app.worker.receive()
            assert (msg.sampling.grammar is not None) == has_grammar
            assert not msg.sampling.skip_special_tokens
            names = [tool["function"]["name"] for tool in msg.prompt.tools]
            assert names == [
                tool["function"]["name"]
                for tool in fields.get("tools", TOOLS)
                if "none" not in fields.values()
            ]
            app.worker.send(UserReply(msg.uid, finish="stop"))
            await call.done

    run(scenario())


def test_a_model_without_a_chat_template_says_that_it_takes_no_tools() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            call = app.post(CHAT, tools=TOOLS)
            await call.done
            assert "no chat template" in assert_is_error(call, 400, param="tools")["message"]

    run(scenario())


def test_an_answer_comes_back_as_a_turn_of_the_next_request() -> None:
    """As OpenAI's client sends its own message object back."""

    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app, client_of(app) as client:
            app.worker.answer_with(token_replies(THOUGHT + CALLS))
            asked: list[Any] = [{"role": "user", "content": "hi"}]
            tools: Any = TOOLS
            first = await client.chat.completions.create(model="m", messages=asked, tools=tools)
            message: Any = first.choices[0].message
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "1"}
                for call in message.tool_calls
            ]
            again = await client.chat.completions.create(
                model="m", messages=[*asked, message, *results], tools=tools
            )
            assert again.choices[0].finish_reason == "tool_calls"

    run(scenario())


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 30])
def test_a_number_that_no_float_holds_stays_as_the_model_wrote_it(number: str) -> None:
    """In the answer, and when the call comes back."""
    arguments = f'{{"x": {number}}}'
    choice = ask(f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>')
    assert called(choice) == [("get", arguments)]
    turns = [
        {"role": "user", "content": "hi"},
        {**choice["message"], "tool_calls": [{**choice["message"]["tool_calls"][0], "id": "c1"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]

    async def scenario() -> None:
        async with running_app(model=SPEAKER) as app:
            call = app.post(CHAT, tools=TOOLS, messages=turns)
            msg = await app.worker.receive()
            (sent,) = msg.prompt.messages[1]["tool_calls"]
            assert sent["function"]["arguments"] == arguments
            app.worker.send(UserReply(msg.uid, finish="stop"))
            await call.done
            assert call.status == 200

    run(scenario())
