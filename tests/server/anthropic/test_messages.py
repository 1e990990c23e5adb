"""POST /v1/messages: whole, as events, and as Anthropic's client reads both.

The client takes seconds to import, so only the tests that need it do, and not who collects tests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.message import (
    AbortMsg,
    CodecReply,
    Conversation,
    EncodeMsg,
    ReplyError,
    TokenizeMsg,
    UserReply,
    pack_ids,
)
from minisgl.server.anthropic import MessagesRequest, messages
from minisgl.server.parsing.tool_calls import MAX_DEPTH
from tests.server.harness import CONFIG, App, Script, run_with_app, wait_until
from tests.server.openai.test_chat_tools import CALLS, SPEAKER, THOUGHT

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("get", "put")]


@asynccontextmanager
async def client_of(app: App, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    transport = httpx2.ASGITransport(app=app.app)
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        AsyncAnthropic(
            base_url="http://test", http_client=http, max_retries=0, **{"api_key": "x", **options}
        ) as client,
    ):
        yield client


def replies(text: str, **end: Any) -> Script:
    """A script that says a text three characters at a time."""

    def script(msg: TokenizeMsg) -> list[UserReply]:
        counts = {"num_prompt": 5, "num_cached": 4}
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        said = [UserReply(msg.uid, piece, num_output=1, **counts) for piece in pieces]
        return [*said, UserReply(msg.uid, num_output=7, **counts, **{"finish": "stop", **end})]

    return script


def answer(text: str, *, asked: dict[str, Any] | None = None, **end: Any) -> Any:
    """The message to a request, whole. Anthropic's client must make an equal one of the events."""
    answers: list[Any] = []

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies(text, **end))
        async with client_of(app) as client:
            fields = {**ASKED, **(asked or {})}
            answers.append(await client.messages.create(**fields))
            async with client.messages.stream(**fields) as stream:
                answers.append(await stream.get_final_message())

    run_with_app(scenario, model=SPEAKER)
    whole, streamed = (message.model_dump(exclude={"id"}) for message in answers)
    for message in (whole, streamed):
        for block in message["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
    assert whole == streamed
    return answers[0]


def test_a_text_is_one_block_and_usage_tells_cached_tokens_apart() -> None:
    message = answer("Hé\n👍")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hé\n👍"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 4, 7)


@pytest.mark.parametrize(
    ("end", "stop_reason"),
    [
        ({"finish": "length"}, "max_tokens"),
        ({"finish": "stop", "stop_text": "END"}, "stop_sequence"),
    ],
)
def test_a_message_says_why_it_ended(end: dict[str, Any], stop_reason: str) -> None:
    message = answer("a", asked={"stop_sequences": ["END"]}, **end)
    assert message.stop_reason == stop_reason
    assert message.stop_sequence == end.get("stop_text")


@pytest.mark.parametrize(
    ("text", "stop_reason"),
    [
        (CALLS, "tool_use"),
        (CALLS.partition("</tool_call>")[0], "tool_use"),
        (CALLS.partition(" {")[0], "stop_sequence"),
    ],
    ids=["whole", "whole arguments", "cut off"],
)
def test_calls_before_a_stop_sequence_are_to_be_run(text: str, stop_reason: str) -> None:
    """A client runs them if the reason is "tool_use". It cannot run one that was cut off."""
    end = {"finish": "stop", "stop_text": "END"}
    message = answer(text, asked={"tools": TOOLS, "stop_sequences": ["END"]}, **end)
    assert message.stop_reason == stop_reason
    assert message.stop_sequence == (None if stop_reason == "tool_use" else "END")


@pytest.mark.parametrize(
    ("stop_text", "stop_reason"), [("END", "stop_sequence"), (None, "end_turn")]
)
def test_a_message_whose_enforced_call_is_cut_off_does_not_say_tool_use(
    stop_text: str | None, stop_reason: str
) -> None:
    """The tool would run without its arguments."""

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies(CALLS[:52], stop_text=stop_text))
        fields = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "any"}}
        whole = app.post(ROUTE, **fields, stop_sequences=["END"])
        stream = app.post(ROUTE, **fields, stop_sequences=["END"], stream=True)
        await whole.done
        await stream.done
        message = json.loads(whole.body)
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        end = {"stop_reason": stop_reason, "stop_sequence": stop_text}
        assert {name: message[name] for name in end} == end
        assert json.dumps({"delta": end}, separators=(",", ":"))[1:-1] in stream.body.decode()

    run_with_app(scenario, model=SPEAKER)


def test_reasoning_and_calls_are_blocks_of_their_own() -> None:
    message = answer(THOUGHT + "So: " + CALLS, asked={"tools": TOOLS})
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert text.text.strip() == "So:"
    assert [(call.name, call.input) for call in calls] == [("get", {"x": 'é"}'}), ("put", {})]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "end", "stop_reason"),
    [
        ('{"x": tru}}', {}, "end_turn"),
        ('{"x": NaN}}', {}, "end_turn"),
        ('{"x": "\\ud800"}}', {}, "end_turn"),
        ('{"x": "a', {}, "end_turn"),
        ('{"x": "a', {"finish": "length"}, "max_tokens"),
    ],
)
def test_what_is_no_whole_call_is_text_also_in_a_stream(
    arguments: str, end: dict[str, Any], stop_reason: str
) -> None:
    """Anthropic's client cannot go on after arguments that are no JSON."""
    text = '<tool_call>\n{"name": "get", "arguments": ' + arguments
    message = answer(text, asked={"tools": TOOLS}, **end)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": text}]
    assert message.stop_reason == stop_reason


@pytest.mark.parametrize("number", ["1e400", "1.50", "1" + "0" * 30])
def test_a_number_in_a_call_stays_as_the_model_wrote_it(number: str) -> None:
    arguments = f'{{"x": {number}}}'
    text = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies(text))
        for stream, written in ((False, arguments), (True, json.dumps(arguments))):
            call = app.post(ROUTE, **ASKED, tools=TOOLS, stream=stream)
            await call.done
            assert call.status == 200
            field = "partial_json" if stream else "input"
            assert f'"{field}":{written}' in call.body.decode()

    run_with_app(scenario, model=SPEAKER)


@pytest.mark.parametrize(("seconds_a_reply", "num_pings"), [(4, len(CALLS) // 9), (0.01, 0)])
def test_while_a_stream_holds_a_call_back_it_sends_pings(
    seconds_a_reply: float, num_pings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ten seconds: with every third reply of three characters, if one comes in four."""
    times = itertools.count(100.0, seconds_a_reply)
    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: next(times)))

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies(CALLS))
        call = app.post(ROUTE, **ASKED, tools=TOOLS, stream=True)
        await call.done
        assert abs(call.body.decode().count("event: ping\n") - num_pings) <= 2 * (num_pings > 0)

    run_with_app(scenario, model=SPEAKER)
    blocks = answer(CALLS, asked={"tools": TOOLS}).content
    assert [block.type for block in blocks] == ["tool_use", "tool_use"]


def test_text_stands_between_the_calls_where_it_was_said() -> None:
    calls = CALLS.replace("\n<tool_call>", "b<tool_call>")
    message = answer(f"{THOUGHT}a{calls}c", asked={"tools": TOOLS})
    said = [getattr(block, "text", None) or block.type for block in message.content]
    assert said == ["thinking", "a", "tool_use", "b", "tool_use", "c"]


def test_an_answer_of_thoughts_alone_has_one_block() -> None:
    message = answer("<think>\nHm, so", finish="length")
    assert [(block.type, block.thinking) for block in message.content] == [("thinking", "Hm, so")]


def test_thoughts_may_be_left_out_and_their_block_stays() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = answer(THOUGHT + "So", asked={"thinking": thinking})
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "", "So")
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": [thought.to_dict(), text.to_dict()]},
        *ASKED["messages"],
    ]
    assert conversation(messages=turns).messages[1] == {"role": "assistant", "content": "So"}


def test_an_empty_answer_has_a_block() -> None:
    assert [block.type for block in answer("", finish="length").content] == ["text"]


def test_a_stream_tells_of_its_blocks_in_order() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(replies(THOUGHT + "So"))
        call = app.post(ROUTE, **ASKED, stream=True)
        await call.done
        events = [
            json.loads(line.removeprefix("data: "))
            for line in call.body.decode().splitlines()
            if line.startswith("data: ")
        ]
        kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
        assert kinds == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert events[0]["message"]["content"] == []

    run_with_app(scenario, model=SPEAKER)


def test_an_error_has_anthropics_form_and_its_class_in_the_client() -> None:
    import anthropic

    async def scenario(app: App) -> None:
        async with client_of(app) as client:
            with pytest.raises(anthropic.BadRequestError) as bad:
                await client.messages.create(
                    **{**ASKED, "tool_choice": {"type": "none", "name": 5}}
                )
            assert bad.value.body["type"] == "error"
            assert bad.value.body["error"]["type"] == "invalid_request_error"
            assert "tool_choice.name" in bad.value.body["error"]["message"]
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**ASKED, "model": "other"})
            async with client_of(app, api_key="wrong") as stranger:
                with pytest.raises(anthropic.AuthenticationError):
                    await stranger.messages.create(**ASKED)

    run_with_app(scenario, config=replace(CONFIG, api_key=("x",)))


def test_answers_and_errors_have_the_id_by_which_anthropics_client_names_a_request() -> None:
    import anthropic

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies("ok"))
        async with client_of(app) as client:
            message = await client.messages.create(**ASKED, extra_headers={"x-request-id": "abc"})
            assert message._request_id == "abc"
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.messages.create(**{**ASKED, "model": "other"})
            assert unknown.value.request_id is not None
            assert unknown.value.body["request_id"] == unknown.value.request_id
            async with client_of(app, api_key="wrong") as stranger:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await stranger.messages.create(**ASKED)
            assert refused.value.body["request_id"] == refused.value.request_id is not None
        chat = app.call("GET", "/v1/models", headers=[(b"x-api-key", b"x")])
        await chat.done
        assert "request-id" not in chat.headers

    run_with_app(scenario, config=replace(CONFIG, api_key=("x",)))


def test_errors_about_models_have_the_form_of_the_client_that_asks() -> None:
    import anthropic

    async def scenario(app: App) -> None:
        async with client_of(app) as client:
            assert (await client.models.retrieve("m"))._request_id is not None
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.models.retrieve("other")
        assert unknown.value.body["error"]["type"] == "not_found_error"
        assert unknown.value.body["request_id"] == unknown.value.request_id is not None
        async with client_of(app, api_key="wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key") as refused:
                await stranger.models.list()
        assert refused.value.body["error"]["type"] == "authentication_error"

    run_with_app(scenario, config=replace(CONFIG, api_key=("x",)))


def test_errors_of_paths_below_messages_have_the_form_of_this_api() -> None:
    import anthropic

    async def scenario(app: App) -> None:
        async with client_of(app) as client:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.count_tokens(model="m", messages=[])
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"

    run_with_app(scenario)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue"}])
def test_a_thread_is_refused_as_clients_of_threads_understand(thread: dict[str, str]) -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **ASKED, thread=thread)
        await call.done
        assert call.status == 400
        error = json.loads(call.body)["error"]
        assert error["type"] == "invalid_request_error"
        assert "thread: it is not supported" in error["message"]
        assert error["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
        other = app.post(ROUTE, **ASKED, container="c")
        await other.done
        assert "details" not in json.loads(other.body)["error"]

    run_with_app(scenario)


def test_a_thread_of_the_client_sends_the_whole_conversation_each_time() -> None:
    seen: list[int] = []

    def script(msg: TokenizeMsg) -> list[UserReply]:
        assert isinstance(msg.prompt, Conversation)
        seen.append(len(msg.prompt.messages))
        return replies("ok")(msg)

    async def scenario(app: App) -> None:
        import anthropic

        app.worker.answer_with(script)
        async with client_of(app) as client:
            strict = client.beta.messages.thread(model="m", max_tokens=9)
            with pytest.raises(anthropic.BadRequestError, match="thread"):
                await strict.send({"role": "user", "content": "one"})
            thread = client.beta.messages.thread(
                model="m", max_tokens=9, unsupported_request_behavior="continue_unthreaded"
            )
            await thread.send({"role": "user", "content": "one"})
            await thread.send({"role": "user", "content": "two"})

    run_with_app(scenario)
    assert seen == [1, 3]


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **ASKED, stream=True)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, "a"))
        await wait_until(lambda: b"text_delta" in call.body)
        app.worker.send(UserReply(uid, error=ReplyError(500, "internal_error", "oh")))
        await call.done
        event, data = call.body.decode().strip().split("\n\n")[-1].split("\n")
        assert event == "event: error"
        error = {"type": "api_error", "message": "oh"}
        assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}

    run_with_app(scenario)


def test_a_time_out_has_anthropics_type() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **ASKED)
        uid = (await app.worker.receive()).uid
        app.worker.send(UserReply(uid, error=ReplyError(504, "timeout", "it took too long")))
        await call.done
        assert call.status == 504
        assert json.loads(call.body)["error"]["type"] == "timeout_error"

    run_with_app(scenario)


def test_a_client_that_goes_away_aborts_its_message() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **ASKED)
        uid = (await app.worker.receive()).uid
        call.disconnect()
        assert await app.worker.receive() == AbortMsg(uid)
        await call.done

    run_with_app(scenario)


def test_tokens_are_counted() -> None:
    async def scenario(app: App) -> None:
        async with client_of(app) as client:
            counting = asyncio.create_task(
                client.messages.count_tokens(
                    model="m", system="be brief", messages=ASKED["messages"]
                )
            )
            msg = await app.worker.receive()
            assert isinstance(msg, EncodeMsg)
            assert isinstance(msg.prompt, Conversation)
            assert [turn["role"] for turn in msg.prompt.messages] == ["system", "user"]
            app.worker.send_message(CodecReply(msg.uid, ids=pack_ids([1, 2, 3])))
            assert (await counting).input_tokens == 3

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"type": "tool"}, "tool_choice.name: it is required"),
        ({"type": "tool", "name": None}, "tool_choice.name: it must be a string, got null"),
        ({"type": "tool", "name": "no"}, "tool_choice names 'no', which is not among the tools"),
    ],
)
def test_a_tool_is_chosen_by_its_name(choice: dict[str, Any], message: str) -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **ASKED, tools=TOOLS, tool_choice=choice)
        await call.done
        assert call.status == 400
        assert json.loads(call.body)["error"]["message"] == message

    run_with_app(scenario, model=SPEAKER)


def test_a_call_that_no_tool_can_answer_is_refused_in_no_other_apis_words() -> None:
    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **ASKED, tool_choice={"type": "any"})
        await call.done
        assert call.status == 400
        message = json.loads(call.body)["error"]["message"]
        assert message == "tool_choice asks for a call, but there are no tools"

    run_with_app(scenario, model=SPEAKER)


# The request.


def read(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(json.loads(json.dumps({**ASKED, **fields})))


def conversation(**fields: Any) -> Conversation:
    (prompt,) = read(**fields).prompts()
    assert isinstance(prompt, Conversation)
    return prompt


def test_blocks_become_the_turns_of_a_chat() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                {"type": "text", "text": "so", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "get", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "two"}],
                },
                {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    prompt = conversation(messages=turns, system=system, tools=TOOLS)
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"x": "é"}}}
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": "go"},
    ]
    assert [tool["function"]["name"] for tool in prompt.tools] == ["get", "put"]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": "é", "y": 1' + "0" * 30 + "}",
        r'{"x": "\u0000"}',
        r'{"x": "\ud800"}',
        '{"x": ' + "[" * 100 + "]" * 100 + "}",
    ],
)
def test_a_call_that_cannot_be_sent_on_as_an_object_is_text(arguments: str) -> None:
    """As in a chat. A conversation goes on with whatever this server has answered."""
    call = {"type": "tool_use", "id": "c1", "name": "get", "input": json.loads(arguments)}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [call]}, *ASKED["messages"]]
    called = conversation(messages=turns).messages[1]["tool_calls"][0]["function"]["arguments"]
    assert called == arguments


@pytest.mark.parametrize(
    ("number", "read_as"),
    [("1e400", "inf"), ("-1e400", "-inf"), ("Infinity", "inf"), ("NaN", "nan")],
)
@pytest.mark.parametrize("where", ['{"x": %s}', '{"x": [{"y": %s}]}'])
def test_a_number_of_a_call_that_is_none_of_json_is_refused(
    where: str, number: str, read_as: str
) -> None:
    """The model would see the word Infinity. A chat sends arguments as a text, which stays."""
    call = {"type": "tool_use", "id": "c1", "name": "get", "input": json.loads(where % number)}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [call]}, *ASKED["messages"]]
    body = json.dumps({**ASKED, "messages": turns}).replace(
        json.dumps(call["input"]), where % number
    )

    async def scenario(app: App) -> None:
        sent = app.call("POST", ROUTE, body.encode())
        await sent.done
        assert sent.status == 400
        message = json.loads(sent.body)["error"]["message"]
        assert "messages" in message
        assert f"a number in it is {read_as}: numbers are floats of 64 bits" in message

    assert number in body
    run_with_app(scenario, model=SPEAKER)


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_call_that_nests_too_deep_to_come_back_is_text(num_more: int) -> None:
    num_lists = MAX_DEPTH - 1 + num_more
    arguments = '{"x": ' + "[" * num_lists + "1" + "]" * num_lists + "}"
    call = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'

    async def scenario(app: App) -> None:
        app.worker.answer_with(replies(call))
        first = app.post(ROUTE, **ASKED, tools=TOOLS)
        await first.done
        content = json.loads(first.body)["content"]
        assert [block["type"] for block in content] == ["text" if num_more else "tool_use"]
        turns = [*ASKED["messages"], {"role": "assistant", "content": content}]
        again = app.post(ROUTE, **{**ASKED, "messages": [*turns, *ASKED["messages"]]})
        await again.done
        assert again.status == 200, again.body

    run_with_app(scenario, model=SPEAKER)


def test_a_turn_without_blocks_is_an_empty_turn() -> None:
    empty = {"role": "user", "content": []}
    assert conversation(messages=[empty]).messages == [{"role": "user", "content": ""}]
    result = {"type": "tool_result", "tool_use_id": "c1"}
    turn = {"role": "user", "content": [result]}
    assert conversation(messages=[turn]).messages == [
        {"role": "tool", "tool_call_id": "c1", "content": ""}
    ]


@pytest.mark.parametrize(
    "content", ["go", [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]]
)
def test_a_turn_of_the_system_stays_in_its_place(content: Any) -> None:
    user = {"role": "user", "content": "hi"}
    turns = [user, {"role": "system", "content": content}]
    prompt = conversation(messages=turns, system="be brief")
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        user,
        {"role": "system", "content": "go"},
    ]
    assert prompt.options == {}


def test_a_tool_may_have_null_for_the_properties_that_it_does_not_list() -> None:
    schema = {"type": "object", "properties": None, "required": None}
    tools = [{"name": "now", "input_schema": schema}]
    (tool,) = read(tools=tools).functions_of_tools
    assert tool.parameters == {"type": "object"}


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    assert conversation(messages=turns).options == {
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert conversation().options == {}


@pytest.mark.parametrize(("kind", "expected"), [("enabled", True), ("disabled", False)])
def test_thinking_is_the_switch_of_the_template(kind: str, expected: bool) -> None:
    request = read(thinking={"type": kind, "budget_tokens": 1024})
    assert conversation(thinking={"type": kind}).variables == {"enable_thinking": expected}
    assert request.allows_reasoning is expected
    assert conversation().variables == {}


def test_parameters_go_to_the_engine_by_their_names() -> None:
    sampling = read(
        stop_sequences=["END"],
        top_k=5,
        temperature=0.5,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    ).sampling({})
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (9, 5, 0.5)
    assert sampling.stop == ("END",)
    assert sampling.grammar == Grammar("json_schema", json.dumps(SCHEMA))


def test_a_format_at_the_top_is_that_of_output_config() -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    assert read(output_format=format).sampling({}).grammar == grammar
    with pytest.raises(InvalidRequest, match="both output_config and output_format"):
        read(output_format=format, output_config={"format": format}).sampling({})


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_an_answer_in_a_format_cannot_be_begun_by_the_client(name: str) -> None:
    """The grammar is that of a whole answer: behind a beginning, it would begin again."""
    format = {"type": "json_schema", "schema": SCHEMA}
    fields = {name: {"format": format} if name == "output_config" else format}
    turns = [*ASKED["messages"], {"role": "assistant", "content": "{"}]

    async def scenario(app: App) -> None:
        call = app.post(ROUTE, **{**ASKED, **fields, "messages": turns})
        await call.done
        error = json.loads(call.body)["error"]
        assert (call.status, error["type"]) == (400, "invalid_request_error")
        assert error["message"] == (
            f"{name}: an answer in a format cannot continue a last turn of the assistant"
        )

    run_with_app(scenario)


def test_calls_side_by_side_may_be_forbidden_as_in_a_chat() -> None:
    assert not read(tools=TOOLS, parallel_tool_calls=False).tool_use.is_parallel
    assert read(tools=TOOLS, parallel_tool_calls=True).tool_use.is_parallel


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "get"}, ("required", "get", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(choice: dict[str, Any], expected: Any) -> None:
    use = read(tools=TOOLS, tool_choice=choice).tool_use
    assert (use.choice, use.named_tool, use.is_parallel) == expected
