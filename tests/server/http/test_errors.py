"""Errors: status, code and the field at fault, before the first byte of an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.parse import urljoin

import pytest

from minisgl.message import (
    CodecReply,
    DecodeMsg,
    ReplyError,
    UserReply,
)
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.reasoning import REASONING_FORMATS
from tests.server.harness import (
    CHAT,
    MODEL,
    RESPONSES,
    TEXT,
    App,
    all_routes,
    assert_is_error,
    run_with_app,
)
from tests.server.openai.test_chat_tools import SPEAKER

FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "a" * 2**17}}}


@all_routes
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_worker_is_an_error_before_any_byte(route: str, stream: bool) -> None:
    async def scenario(app: App) -> None:
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

    run_with_app(scenario)


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
    async def scenario(app: App) -> None:
        call = app.post(route, **body)
        msg = await app.worker.receive()
        refusal = ReplyError(400, "invalid_value", "it is bad")
        app.worker.send_message(
            (CodecReply if isinstance(msg, DecodeMsg) else UserReply)(msg.uid, error=refusal)
        )
        await call.done
        assert_is_error(call, 400, message="it is bad", param=field)

    run_with_app(scenario)


@all_routes
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_first_token_is_a_503(route: str, stream: bool) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, stream=stream)
        await app.worker.receive()
        app.frontend.fail("the engine is gone")
        await call.done
        assert_is_error(
            call, 503, message="the engine is gone", type="server_error", code="engine_failed"
        )
        again = app.post(route)
        await again.done
        assert_is_error(again, 503, message="the engine is gone")

    run_with_app(scenario)


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
    async def scenario(app: App) -> None:
        call = app.call(method, path)
        await call.done
        error = assert_is_error(call, status, type="invalid_request_error")
        assert f"{method} {path}" in error["message"]

    run_with_app(scenario)


@pytest.mark.parametrize("prefix", ["", "/a/prefix"])
@pytest.mark.parametrize(
    ("method", "path", "target"),
    [
        ("POST", f"{CHAT}/", CHAT),
        ("POST", "/generate/", "/generate"),
        ("GET", "/health/?x=/y/", "/health?x=/y/"),
    ],
)
def test_a_slash_at_the_end_is_a_redirect_that_holds_behind_a_proxy(
    method: str, path: str, target: str, prefix: str
) -> None:
    """The proxy's clients see another scheme and host, and perhaps a longer path."""
    proxy = f"https://proxy.example{prefix}"

    async def scenario(app: App) -> None:
        call = app.call(method, path)
        await call.done
        assert call.status == 307
        assert urljoin(proxy + path, call.headers["location"]) == proxy + target

    run_with_app(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/v1/nothing/",
        "/health//",
        "//proxy.example/",
        "/v1/chat//completions",
        f"{CHAT}%2f",  # where `..` would lead to another endpoint
    ],
)
def test_no_other_path_is_redirected(path: str) -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", path)
        await call.done
        assert_is_error(call, 404)

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", f"{RESPONSES}/resp_1", "DELETE, GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("HEAD", TEXT, "POST"),
    ],
)
def test_a_405_says_what_is_allowed(method: str, path: str, allowed: str) -> None:
    async def scenario(app: App) -> None:
        call = app.call(method, path)
        await call.done
        error = assert_is_error(call, 405)
        assert call.headers["allow"] == allowed
        assert f"allowed: {allowed}" in error["message"]

    run_with_app(scenario)


@all_routes
def test_too_many_requests_are_a_429_and_the_open_ones_go_on(route: str) -> None:
    async def scenario(app: App) -> None:
        first = app.post(route)
        uid = (await app.worker.receive()).uid
        second = app.post(route)
        await second.done
        assert_is_error(second, 429, type="rate_limit_error", code="queue_full")
        assert int(second.headers["retry-after"]) >= 1
        app.worker.send(UserReply(uid, "ok", finish="stop"))
        await first.done
        assert first.status == 200

    run_with_app(scenario, max_open_requests=1)


@all_routes
def test_another_model_is_a_404(route: str) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, model="gpt-9")
        await call.done
        error = assert_is_error(call, 404, param="model", code="model_not_found")
        assert "gpt-9" in error["message"]
        assert "'m'" in error["message"]
        call = app.post(route, model="gpt" * 10**4)
        await call.done
        error = assert_is_error(call, 404, param="model", code="model_not_found")
        assert len(error["message"]) < 256

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]},
            "messages.1.role",
        ),
        ({"use_beam_search": True}, "use_beam_search"),
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
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop.1"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop_token_ids": [1] * 33}, "stop_token_ids"),
        ({"guided_json": {"a": float("nan")}}, "guided_json"),
        ({"guided_json": "\ud800"}, "guided_json"),
        ({"guided_json": {"a": json.loads("[" * 64 + "1" + "]" * 64)}}, "guided_json"),
        ({"guided_json": '{"a": ' + "[" * 64 + "1" + "]" * 64 + "}"}, "guided_json"),
    ],
)
def test_an_error_names_the_field_as_openai_does(fields: dict[str, Any], param: str) -> None:
    async def scenario(app: App) -> None:
        call = app.post(CHAT, **fields)
        await call.done
        error = assert_is_error(call, 400, type="invalid_request_error", param=param)
        assert param in error["message"]

    run_with_app(scenario)


@pytest.mark.parametrize(("num_prompts", "n", "num_answers"), [(1, 9, 9), (3, 3, 9), (8, 2, 16)])
def test_too_many_answers_are_refused_before_a_worker_is_asked(
    num_prompts: int, n: int, num_answers: int
) -> None:
    """A tokenizer is asked for the text of ids that are echoed, and here nobody answers."""

    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=[[1]] * num_prompts, n=n, echo=True)
        await call.done
        message = f"{num_answers} answers in one request; this server takes at most 8"
        assert_is_error(call, 400, param="n", message=message)

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("prompt", "param", "reason"),
    [
        ([-1], "prompt.0", "must be >= 0"),
        ([[5], [2**31]], "prompt.1.0", "must be <= "),
    ],
)
def test_an_error_says_what_is_wrong_with_ids(prompt: Any, param: str, reason: str) -> None:
    async def scenario(app: App) -> None:
        call = app.post(TEXT, prompt=prompt)
        await call.done
        assert reason in assert_is_error(call, 400, param=param)["message"]

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"regex": "(?x) a\tb"}, "regex"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex"),
    ],
)
@all_routes
def test_a_pattern_that_no_grammar_has_is_said_of_its_field(
    route: str, fields: dict[str, Any], param: str
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **fields)
        await call.done
        assert_is_error(call, 400, param=param)

    run_with_app(scenario)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": "a\\"}}},
        {"items": {"$ref": "#/long"}, "long": {"enum": ["a" * 2**17]}},
    ],
    ids=["pattern", "references"],
)
@pytest.mark.parametrize("has_format", [False, True])
def test_a_schema_of_a_tool_that_no_grammar_has_is_said_of_the_tool(
    schema: dict[str, Any], has_format: bool
) -> None:
    good = {"type": "function", "function": {"name": "good"}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema, "strict": True}}
    fields = {"response_format": {"type": "json_object"}} if has_format else {}

    async def scenario(app: App) -> None:
        call = app.post(CHAT, tools=[good, bad], **fields)
        await call.done
        error = assert_is_error(call, 400, param="tools")
        assert error["message"].startswith("the tool 'bad': ")

    run_with_app(scenario, model=SPEAKER)


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
        (
            RESPONSES,
            {"text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}}},  # type: ignore[dict-item]
            "text.format",
        ),
    ],
)
def test_a_grammar_that_is_too_long_is_said_of_its_field(
    route: str, fields: dict[str, Any], param: str
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **fields)
        await call.done
        assert "at most 131072" in assert_is_error(call, 400, param=param)["message"]

    run_with_app(
        scenario,
        model=replace(MODEL, dialect=Dialect(reasoning_format=REASONING_FORMATS["qwen3"])),
    )


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
def test_a_strict_schema_that_names_too_much_is_said_of_its_field(
    route: str, is_strict: bool
) -> None:
    """To close its objects, what its references name is copied."""
    schema = {"items": {"$ref": "#/long"}, "long": {"enum": ["a" * 2**17]}}
    named = {"name": "n", "schema": schema, "strict": is_strict}
    fields: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": named}}
    param = "response_format"
    if route == RESPONSES:
        fields = {"text": {"format": {"type": "json_schema", **named}}}
        param = "text.format"

    async def scenario(app: App) -> None:
        call = app.post(route, **fields)
        await call.done
        message = assert_is_error(call, 400, param=param)["message"]
        assert message.startswith("references of a schema") == is_strict

    run_with_app(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10**30},
        {"top_k": 10**30},
        {"seed": 10**30},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"model": "\ud83d"},
    ],
    ids=str,
)
def test_what_no_message_can_carry_is_refused_and_takes_no_place(fields: dict[str, Any]) -> None:
    async def scenario(app: App) -> None:
        call = app.post(CHAT, **fields)
        await call.done
        assert call.status in (400, 404), call.body
        assert_is_error(call, call.status, type="invalid_request_error")

    run_with_app(scenario)


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
    async def scenario(app: App) -> None:
        call = app.post(CHAT, raw=raw)
        await call.done
        assert_is_error(call, 400, type="invalid_request_error")

    run_with_app(scenario)
