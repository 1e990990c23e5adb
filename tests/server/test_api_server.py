"""The routes over a real frontend: bytes in, bytes out."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from minisgl.core import SamplingParams
from minisgl.message import (
    AbortMsg,
    CodecReply,
    DecodeMsg,
    ReplyError,
    TextLogprobs,
    TokenizeMsg,
    UserReply,
)
from minisgl.server.api_server import ServedModel, create_app
from minisgl.server.frontend import Frontend
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from minisgl.version import __version__
from tests.server.harness import Call, FakeWorker, office, run, spell, until

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL = ServedModel("m", 100, {"temperature": 0.25}, created=1234, width=2)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi"},
}
routes = pytest.mark.parametrize("route", [CHAT, TEXT])
all_routes = pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
LIMIT = 4096


class App:
    """The application, the frontend below it, and the worker below that."""

    def __init__(self, app: FastAPI, frontend: Frontend, worker: FakeWorker) -> None:
        self.app, self.frontend, self.worker = app, frontend, worker
        self._calls: list[Call] = []

    def call(self, method: str, path: str, body: bytes = b"", **options: Any) -> Call:
        self._calls.append(Call(self.app, method, path, body, **options))
        return self._calls[-1]

    def post(self, route: str, *, raw: bytes | None = None, parts: int = 1, **fields: Any) -> Call:
        body = json.dumps({**BODIES.get(route, {}), **fields}).encode() if raw is None else raw
        return self.call("POST", route, body, parts=parts)

    async def cancel_calls(self) -> None:
        """Those that a failed test left behind."""
        for call in self._calls:
            call.done.cancel()
        await asyncio.gather(*(call.done for call in self._calls), return_exceptions=True)


@asynccontextmanager
async def running(
    max_open_requests: int = 8,
    model: ServedModel = MODEL,
    num_tokenizer: int = 1,
    max_body: int = LIMIT,
    **options: Any,
) -> AsyncIterator[App]:
    async with office(max_open_requests, num_tokenizer) as (frontend, worker):
        app = App(create_app(frontend, model, max_body, **options), frontend, worker)
        try:
            yield app
        finally:
            await app.cancel_calls()


def scene(play: Callable[[App], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def whole() -> None:
        async with running(**options) as app:
            await play(app)
            assert app.frontend.num_open == 0, "a request outlived its answer"

    run(whole())


def assert_is_error(call: Call, status: int, **fields: Any) -> dict[str, Any]:
    """The answer is OpenAI's error object with these fields."""
    assert call.status == status, call.body
    assert call.headers["content-type"] == "application/json"
    (error,) = json.loads(call.body).values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert {name: error[name] for name in fields} == fields
    return error  # type: ignore[no-any-return]


def events_of(call: Call) -> list[Any]:
    """The data of each event; every byte of the stream belongs to one."""
    text = call.body.decode()
    assert re.fullmatch(r"(data: [^\n]+\n\n)*", text)
    data = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def test_a_whole_chat_answer_is_openais_object() -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(spell("Hel", "", "lo 👍", num_prompt=5, num_cached=4))
        call = app.post(CHAT)
        await call.done
        assert call.status == 200
        answer = json.loads(call.body)
        assert answer.pop("id").startswith("chatcmpl-")
        assert isinstance(answer.pop("created"), int)
        message = {"role": "assistant", "content": "Hello 👍", "refusal": None}
        assert answer == {
            "object": "chat.completion",
            "model": "m",
            "choices": [
                {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }

    scene(play)


def test_several_prompts_give_several_choices_in_order_and_one_usage() -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b", "c"])
        uids = [(await app.worker.take()).uid for _ in range(3)]
        for uid in reversed(uids):
            app.worker.say(
                UserReply(uid, f"<{uids.index(uid)}>", finish="length", num_prompt=2, num_output=1)
            )
        await call.done
        answer = json.loads(call.body)
        assert answer["object"] == "text_completion"
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
            (0, "<0>"),
            (1, "<1>"),
            (2, "<2>"),
        ]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 3)

    scene(play)


PROMPT_LOGPROBS = [TextLogprobs("<s>", None, []), TextLogprobs("hi", -0.5, [("a", -0.25)])]
ANSWER_LOGPROBS = TextLogprobs("yo", -1.0, [("b", -0.75)])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_ids_is_their_text_and_its_log_probabilities_come_first(stream: bool) -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, prompt=[[1, 2], [3]], echo=True, logprobs=1, stream=stream)
        for text in ("<s>hi", "x"):
            question = await app.worker.take()
            app.worker.put(CodecReply(question.uid, text=text))
        uids = [(await app.worker.take()).uid for _ in range(2)]
        first = {
            "logprobs": [ANSWER_LOGPROBS],
            "prompt_logprobs": PROMPT_LOGPROBS,
            "num_prompt": 2,
            "num_output": 1,
        }
        app.worker.say(
            UserReply(uids[0], "yo", **first),
            UserReply(uids[1], prompt_logprobs=PROMPT_LOGPROBS[:1]),
        )
        for uid in uids:
            app.worker.say(UserReply(uid, finish="length"))
        await call.done
        events = events_of(call)[:-1] if stream else [json.loads(call.body)]
        choices = [
            choice for event in events for choice in event["choices"] if choice["index"] == 0
        ]
        assert "".join(choice["text"] for choice in choices) == "<s>hiyo"
        (logprobs,) = (choice["logprobs"] for choice in choices if choice["logprobs"])
        assert logprobs == {
            "tokens": ["<s>", "hi", "yo"],
            "token_logprobs": [None, -0.5, -1.0],
            "top_logprobs": [None, {"a": -0.25}, {"b": -0.75}],
            "text_offset": [0, 3, 5],
        }
        assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == 1) == "x"

    scene(play)


def test_an_echo_without_an_answer() -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(lambda msg: [UserReply(msg.uid, finish="length", num_prompt=2)])
        call = app.post(TEXT, echo=True, max_tokens=0)
        await call.done
        answer = json.loads(call.body)
        assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("hi", None)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 0)
        silent = app.post(TEXT, max_tokens=0)
        await silent.done
        assert_is_error(silent, 400, param="max_tokens")

    scene(play)


def test_a_chat_stream_byte_by_byte() -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(spell("Hé", "", "\n\nline\r\u2028"))
        call = app.post(CHAT, stream=True)
        await call.done
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert call.headers["cache-control"] == "no-cache"
        first = json.loads(call.chunks[0].removeprefix(b"data: "))
        head = f'"id": "{first["id"]}", "object": "chat.completion.chunk", "created": {first["created"]}, "model": "m"'

        def event(delta: str, finish: str) -> str:
            choice = (
                f'{{"index": 0, "delta": {delta}, "logprobs": null, "finish_reason": {finish}}}'
            )
            return f'data: {{{head}, "choices": [{choice}]}}\n\n'

        assert call.body.decode() == (
            event('{"role": "assistant", "content": ""}', "null")
            + event('{"content": "Hé"}', "null")
            + event('{"content": "\\n\\nline\\r\u2028"}', "null")
            + event("{}", '"stop"')
            + "data: [DONE]\n\n"
        )

    scene(play)


def test_a_text_stream_has_text_and_then_its_end() -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(spell("a", "", "b"))
        call = app.post(TEXT, stream=True)
        await call.done
        *chunks, done = events_of(call)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
            ("a", None),
            ("b", "stop"),
        ]

    scene(play)


@routes
def test_a_stream_that_asks_for_usage_ends_with_it(route: str) -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(spell("a", "b", num_prompt=7, num_cached=6))
        call = app.post(route, stream=True, stream_options={"include_usage": True})
        await call.done
        *chunks, usage, done = events_of(call)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 9
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
        assert done == "[DONE]"
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1

    scene(play)


@routes
def test_a_stream_that_does_not_ask_for_usage_has_none(route: str) -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(spell("a"))
        call = app.post(route, stream=True)
        await call.done
        assert not any("usage" in chunk for chunk in events_of(call)[:-1])

    scene(play)


def test_a_streams_first_piece_is_sent_before_its_second_is_made() -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, stream=True)
        uid = (await app.worker.take()).uid
        app.worker.say(UserReply(uid, "first"))
        await until(lambda: b"first" in call.body)
        app.worker.say(UserReply(uid, "second", finish="stop"))
        await call.done
        assert [event["choices"][0]["text"] for event in events_of(call)[:-1]] == [
            "first",
            "second",
        ]

    scene(play)


@all_routes
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_worker_is_an_error_before_any_byte(route: str, stream: bool) -> None:
    async def play(app: App) -> None:
        refusal = ReplyError(400, "context_length_exceeded", "101 tokens", "prompt")
        app.worker.answer_with(lambda msg: [UserReply(msg.uid, error=refusal)])
        call = app.post(route, stream=stream)
        await call.done
        assert_is_error(
            call,
            400,
            message="101 tokens",
            type="invalid_request_error",
            param="prompt",
            code="context_length_exceeded",
        )

    scene(play)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (CHAT, {}, "messages"),
        (TEXT, {}, "prompt"),
        (RESPONSES, {}, "input"),
        ("/generate", {"prompt": "hi"}, "prompt"),
        ("/v1/embeddings", {"model": "m", "input": "hi"}, "input"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
        (TEXT, {"prompt": [5], "echo": True}, "prompt"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said_of_the_field_that_the_client_sent(
    route: str, body: dict[str, Any], field: str
) -> None:
    async def play(app: App) -> None:
        call = app.post(route, **body)
        msg = await app.worker.take()
        refusal = ReplyError(400, "invalid_value", "it is bad")
        app.worker.put(
            (CodecReply if isinstance(msg, DecodeMsg) else UserReply)(msg.uid, error=refusal)
        )
        await call.done
        assert_is_error(call, 400, message="it is bad", param=field)

    scene(play)


def test_if_one_of_several_prompts_is_refused_all_are() -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b"], stream=True)
        first, second = [(await app.worker.take()).uid for _ in range(2)]
        app.worker.say(
            UserReply(first, "text"), UserReply(second, error=ReplyError(400, "c", "no", None))
        )
        await call.done
        assert_is_error(call, 400, message="no")
        assert await app.worker.take() == AbortMsg(first)

    scene(play)


@routes
def test_an_engine_that_dies_in_mid_stream_is_the_last_event(route: str) -> None:
    async def play(app: App) -> None:
        call = app.post(route, stream=True)
        app.worker.say(UserReply((await app.worker.take()).uid, "part"))
        await until(lambda: b"part" in call.body)
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

    scene(play)


@all_routes
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_first_token_is_a_503(route: str, stream: bool) -> None:
    async def play(app: App) -> None:
        call = app.post(route, stream=stream)
        await app.worker.take()
        app.frontend.fail("the engine is gone")
        await call.done
        assert_is_error(
            call, 503, message="the engine is gone", type="server_error", code="engine_failed"
        )
        again = app.post(route)
        await again.done
        assert_is_error(again, 503, message="the engine is gone")

    scene(play)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_in_the_middle_of_an_answer_is_said_of_its_field(stream: bool) -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, guided_regex="x+", stream=stream)
        uid = (await app.worker.take()).uid
        error = ReplyError(400, "invalid_value", "it is too large", "grammar")
        app.worker.say(UserReply(uid, "x"), UserReply(uid, error=error))
        await call.done
        said = (events_of(call) if stream else [json.loads(call.body)])[-1]["error"]
        assert (said["message"], said["param"]) == ("it is too large", "guided_regex")

    scene(play)


@all_routes
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_goes_away_aborts_its_request(
    route: str, stream: bool, started: bool
) -> None:
    async def play(app: App) -> None:
        call = app.post(route, stream=stream)
        uid = (await app.worker.take()).uid
        witness = app.post(TEXT, stream=True)
        witness_uid = (await app.worker.take()).uid
        if started:
            app.worker.say(UserReply(uid, "part"), UserReply(witness_uid, "seen"))
            await until(
                lambda: b"seen" in witness.body
            )  # and so has "part" been, whether it is shown or not
        call.hang_up()
        assert await app.worker.take() == AbortMsg(uid)
        await call.done
        app.worker.say(UserReply(witness_uid, finish="stop"))
        await witness.done
        app.worker.answer_with(spell("next"))
        again = app.post(route)
        await again.done
        assert again.status == 200

    scene(play)


def test_health_is_200_until_the_engine_fails() -> None:
    async def play(app: App) -> None:
        call = app.call("GET", "/health")
        await call.done
        assert (call.status, json.loads(call.body)) == (200, {"status": "ok"})
        app.frontend.fail("the engine is gone")
        call = app.call("GET", "/health")
        await call.done
        assert_is_error(call, 503, message="the engine is gone", type="server_error")

    scene(play)


def test_models_lists_the_one_that_is_served() -> None:
    async def play(app: App) -> None:
        call = app.call("GET", "/v1/models")
        await call.done
        assert json.loads(call.body) == {
            "object": "list",
            "data": [
                {
                    "id": "m",
                    "object": "model",
                    "created": 1234,
                    "owned_by": "minisgl",
                    "max_model_len": 100,
                },
            ],
        }

    scene(play)


@pytest.mark.parametrize("name", ["m", "some/model", "a/b/c", "name with spaces", "ü"])
def test_the_model_is_retrieved_by_its_name(name: str) -> None:
    async def play(app: App) -> None:
        call = app.call("GET", f"/v1/models/{name}")
        await call.done
        assert call.status == 200
        assert json.loads(call.body) == {
            "id": name,
            "object": "model",
            "created": 1234,
            "owned_by": "minisgl",
            "max_model_len": 100,
        }

    scene(play, model=replace(MODEL, name=name))


@pytest.mark.parametrize("name", ["", "M", "m/", "m/m", "gpt-9"])
def test_retrieving_another_model_is_a_404(name: str) -> None:
    async def play(app: App) -> None:
        call = app.call("GET", f"/v1/models/{name}")
        await call.done
        error = assert_is_error(
            call, 404, type="invalid_request_error", param="model", code="model_not_found"
        )
        assert repr(name) in error["message"]

    scene(play)


def test_the_version_is_the_packages() -> None:
    async def play(app: App) -> None:
        call = app.call("GET", "/version")
        await call.done
        assert (call.status, json.loads(call.body)) == (200, {"version": __version__})

    scene(play)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/chat/completion", 404),
        ("GET", "/v1/\x00", 404),
        ("GET", CHAT, 405),
        ("PUT", TEXT, 405),
        ("GET", RESPONSES, 405),
        ("PUT", f"{RESPONSES}/resp_1", 405),
        ("POST", f"{RESPONSES}/resp_1/cancel", 404),
        ("DELETE", "/v1/models", 405),
        ("DELETE", "/v1/models/m", 405),
        ("POST", "/health", 405),
        ("BREW", CHAT, 405),
    ],
)
def test_a_wrong_route_or_method_is_an_error_that_names_it(
    method: str, path: str, status: int
) -> None:
    async def play(app: App) -> None:
        call = app.call(method, path)
        await call.done
        error = assert_is_error(call, status, type="invalid_request_error")
        assert f"{method} {path}" in error["message"]

    scene(play)


@all_routes
@pytest.mark.parametrize("parts", [1, 7])
def test_a_body_over_the_limit_is_a_413_however_it_comes(route: str, parts: int) -> None:
    async def play(app: App) -> None:
        call = app.post(route, raw=b" " * (LIMIT + 1), parts=parts)
        await call.done
        error = assert_is_error(call, 413, type="invalid_request_error")
        assert str(LIMIT) in error["message"]

    scene(play)


def test_a_body_of_exactly_the_limit_is_read() -> None:
    async def play(app: App) -> None:
        app.worker.answer_with(spell("ok"))
        call = app.post(TEXT, raw=json.dumps(BODIES[TEXT]).encode().ljust(LIMIT), parts=3)
        await call.done
        assert call.status == 200

    scene(play)


@all_routes
def test_too_many_requests_are_a_429_and_the_open_ones_go_on(route: str) -> None:
    async def play(app: App) -> None:
        first = app.post(route)
        uid = (await app.worker.take()).uid
        second = app.post(route)
        await second.done
        assert_is_error(second, 429, type="rate_limit_error", code="queue_full")
        assert int(second.headers["retry-after"]) >= 1
        app.worker.say(UserReply(uid, "ok", finish="stop"))
        await first.done
        assert first.status == 200

    scene(play, max_open_requests=1)


@all_routes
def test_another_model_is_a_404(route: str) -> None:
    async def play(app: App) -> None:
        call = app.post(route, model="gpt-9")
        await call.done
        error = assert_is_error(call, 404, param="model", code="model_not_found")
        assert "gpt-9" in error["message"]
        assert "'m'" in error["message"]

    scene(play)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]},
            "messages.1.role",
        ),
        ({"tempature": 1}, "tempature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "a\0"}, "stop"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages.0.content"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop.1"),
        ({"guided_json": {"a": float("nan")}}, "guided_json"),
        ({"guided_json": "\ud800"}, "guided_json"),
        ({"guided_json": {"a": json.loads("[" * 64 + "1" + "]" * 64)}}, "guided_json"),
        ({"guided_json": '{"a": ' + "[" * 64 + "1" + "]" * 64 + "}"}, "guided_json"),
    ],
)
def test_an_error_names_the_field_as_openai_does(fields: dict[str, Any], param: str) -> None:
    async def play(app: App) -> None:
        call = app.post(CHAT, **fields)
        await call.done
        error = assert_is_error(call, 400, type="invalid_request_error", param=param)
        assert param in error["message"]

    scene(play)


@pytest.mark.parametrize(
    ("prompt", "param", "said"),
    [
        ([-1], "prompt.0", "greater than or equal to 0"),
        ([[5], [2**31]], "prompt.1.0", "less than or equal to"),
    ],
)
def test_an_error_says_what_is_wrong_with_ids(prompt: Any, param: str, said: str) -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, prompt=prompt)
        await call.done
        assert said in assert_is_error(call, 400, param=param)["message"]

    scene(play)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "a" * 2**17}}}


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"response_format": FORMAT}, "response_format"),
        (
            CHAT,
            {"guided_json": {"title": "a" * (2**17 - 20)}},
            "guided_json",
        ),  # too long with what lets the model think
        (TEXT, {"guided_regex": "a" * (2**17 + 1)}, "guided_regex"),
        (RESPONSES, {"text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}}}, "text"),  # type: ignore[dict-item]
    ],
)
def test_a_grammar_that_is_too_long_is_said_of_its_field(
    route: str, fields: dict[str, Any], param: str
) -> None:
    async def play(app: App) -> None:
        call = app.post(route, **fields)
        await call.done
        assert "at most 131072" in assert_is_error(call, 400, param=param)["message"]

    scene(
        play,
        model=replace(MODEL, dialect=Dialect(reasoning_format=REASONING_FORMATS["qwen3"])),
        max_body=2**20,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10**30},
        {"top_k": 10**30},
        {"seed": 10**30},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"model": "\ud83d"},
        {"\ud83d": 1},
    ],
    ids=str,
)
def test_what_no_message_can_carry_is_refused_and_takes_no_place(fields: dict[str, Any]) -> None:
    async def play(app: App) -> None:
        call = app.post(CHAT, **fields)
        await call.done
        assert call.status in (400, 404), call.body
        assert_is_error(call, call.status, type="invalid_request_error")

    scene(play)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 2000,
        b'{"model": 1e5',
        b"{}",
    ],
)
def test_a_body_that_is_no_request_is_a_400(raw: bytes) -> None:
    async def play(app: App) -> None:
        call = app.post(CHAT, raw=raw)
        await call.done
        assert_is_error(call, 400, type="invalid_request_error")

    scene(play)


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, SamplingParams(temperature=0.25)),
        (
            {"temperature": 0, "top_p": 0.5, "max_tokens": 5, "max_completion_tokens": 9},
            SamplingParams(temperature=0.0, top_p=0.5, max_tokens=9),
        ),
    ],
)
def test_sampling_comes_from_the_request_and_then_from_the_model(
    fields: dict[str, Any], sampling: SamplingParams
) -> None:
    async def play(app: App) -> None:
        call = app.post(CHAT, **fields)
        msg = await app.worker.take()
        assert msg.sampling == sampling
        app.worker.say(UserReply(msg.uid, finish="stop"))
        await call.done

    scene(play)


def test_many_streams_at_once_do_not_mix() -> None:
    async def play(app: App) -> None:
        calls = [app.post(TEXT, prompt=f"p{i}", stream=True) for i in range(8)]
        msgs: list[TokenizeMsg] = [await app.worker.take() for _ in calls]
        for piece in range(5):
            app.worker.say(
                *(
                    UserReply(m.uid, f"{m.prompt}.{piece} ", finish="stop" if piece == 4 else None)
                    for m in msgs
                )
            )
        await asyncio.gather(*(call.done for call in calls))
        for i, call in enumerate(calls):
            text = "".join(event["choices"][0]["text"] for event in events_of(call)[:-1])
            assert text == "".join(f"p{i}.{piece} " for piece in range(5))

    scene(play)


def test_a_stream_of_several_answers_begins_with_the_first_of_each_prompt() -> None:
    async def play(app: App) -> None:
        call = app.post(TEXT, prompt=["a", "b"], n=2, stream=True)
        uids = [(await app.worker.take()).uid for _ in range(4)]
        app.worker.say(UserReply(uids[1], "<1>"))
        app.worker.say(UserReply(uids[2], "<2>"))
        await until(lambda: b"<2>" in call.body)
        for uid in uids:
            app.worker.say(UserReply(uid, finish="stop"))
        await call.done
        shown = [
            (event["choices"][0]["index"], event["choices"][0]["text"])
            for event in events_of(call)[:-1]
        ]
        assert shown[:2] == [(1, "<1>"), (2, "<2>")]

    scene(play)
