"""Fields that no request declares: ignored and logged once, or refused by `--strict-fields`."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from minisgl.errors import InvalidRequest
from minisgl.server.http.body_parser import MAX_PARAMETERS, pack_body, parse_body, unpack_request
from minisgl.server.http.ignored_fields import MAX_LOGGED, IgnoredFieldsLog
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.requests.validation import MAX_IGNORED, IgnoredField, RequestBounds
from tests.server.harness import (
    BODIES,
    CHAT,
    CONFIG,
    TEXT,
    App,
    assert_is_error,
    run_with_app,
    token_replies,
)

LOGGER = "minisgl.server.http.ignored_fields"
MANY = 20_000
BOUNDS = RequestBounds(max_tokens=MANY, max_prompts=8)
STRICT = RequestBounds(max_tokens=MANY, max_prompts=8, strict_fields=True)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATTY = {  # an unknown field at every place
    "model": "m",
    "a": {"deep": [1]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "b": 1}], "c": 1},
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "d": 0, "function": {**CALL["function"], "e": "x"}}],  # type: ignore[dict-item]
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "f": 1, "function": {"name": "f", "g": 1}}],
}
PLACES = {
    ("ChatRequest", "'a'"),
    ("TextPart", "'b'"),
    ("Message", "'c'"),
    ("ToolCall", "'d'"),
    ("CalledFunction", "'e'"),
    ("Tool", "'f'"),
    ("Function", "'g'"),
}


def chat_of(bounds: RequestBounds = BOUNDS, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(json.dumps(body).encode(), ChatRequest, bounds)


def without(body: Any, names: set[str]) -> Any:
    if isinstance(body, list):
        return [without(item, names) for item in body]
    if not isinstance(body, dict):
        return body
    return {name: without(value, names) for name, value in body.items() if name not in names}


def test_unknown_fields_change_nothing_and_are_noted_at_every_place() -> None:
    request = chat_of(**CHATTY)
    assert set(request.ignored_fields) == PLACES
    plain = chat_of(**without(CHATTY, set("abcdeg")))
    assert request.prompts() == plain.prompts()
    assert request.model_dump() == plain.model_dump()


def test_the_fields_of_a_request_that_another_process_reads_come_back() -> None:
    packed = pack_body(json.dumps(CHATTY).encode(), ChatRequest, BOUNDS)
    request = unpack_request(packed, ChatRequest, BOUNDS)
    assert set(request.ignored_fields) == PLACES


def test_an_ignored_field_may_be_larger_than_all_parameters() -> None:
    body = {**CHATTY, "a": "x" * 2 * MAX_PARAMETERS}
    assert len(pack_body(json.dumps(body).encode(), ChatRequest, BOUNDS).parameters) < 1000


@pytest.mark.parametrize("field", [{"\ud800": 1}, {"a": "x\udfff"}, {"a": {"b": ["\ud83d"]}}])
def test_a_large_request_may_have_half_a_surrogate_pair_in_an_ignored_field(
    field: dict[str, Any],
) -> None:
    """As a small one may. It cannot be encoded, and nobody reads it."""
    tools = [{"type": "function", "function": {"name": "f", **field}}]
    body = {**CHATTY, **field, "tools": tools}
    packed = pack_body(json.dumps(body).encode(), ChatRequest, BOUNDS)
    assert unpack_request(packed, ChatRequest, BOUNDS).tools == chat_of(**body).tools


def test_null_is_the_same_as_absent() -> None:
    assert chat_of(a=None).ignored_fields == []


@pytest.mark.parametrize(("place", "name"), [("tools.0", "f"), ("messages.0.content.0", "b")])
def test_a_strict_server_refuses_by_name(place: str, name: str) -> None:
    others = set("abcdefg") - {name}
    fields = without(CHATTY, others)
    fields["tools"] = [{**without(CHATTY["tools"], others)[0], "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match="no such field") as refusal:
        chat_of(STRICT, **fields)
    assert (refusal.value.param, refusal.value.code) == (f"{place}.{name}", "extra_forbidden")


def test_the_names_of_one_request_are_few_short_and_printable() -> None:
    many = {f"{number}\ud83d\n\u202e" + "x" * 1000: 1 for number in range(MANY)}
    noted = chat_of(**many).ignored_fields
    assert len(noted) == MAX_IGNORED
    for field in noted:
        assert len(field.name) < 100
        assert field.name.isprintable()
        assert field.name.isascii()


def test_many_items_with_one_unknown_field_are_one_name() -> None:
    turns = [{"role": "user", "content": "a", "cache_control": {}}] * 1000
    assert chat_of(messages=turns).ignored_fields == [IgnoredField("Message", "'cache_control'")]


def test_a_field_is_logged_once_at_each_place(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        for padding in (0, MAX_PARAMETERS):  # a small body, and one that another process reads
            for route in (CHAT, TEXT, CHAT):
                body = json.dumps({**BODIES[route], "frobnicate": 1, "more": 2})
                call = app.post(route, raw=body.encode() + b" " * padding)
                await call.done
                assert call.status == 200, call.body

    with caplog.at_level(logging.INFO, LOGGER):
        run_with_app(scenario, config=replace(CONFIG, max_body_mb=2))
    assert sorted(record.getMessage() for record in caplog.records if record.name == LOGGER) == [
        f"the field {name!r} of {model} is ignored (see --strict-fields)"
        for name in ("frobnicate", "more")
        for model in ("ChatRequest", "CompletionRequest")
    ]


def test_a_refused_request_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(app: App) -> None:
        call = app.post(CHAT, frobnicate=1, temperature="hot")
        await call.done
        assert_is_error(call, 400, param="temperature")

    with caplog.at_level(logging.INFO, LOGGER):
        run_with_app(scenario)
    assert not caplog.records


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredFieldsLog()
    with caplog.at_level(logging.INFO, LOGGER):
        for number in range(2 * MAX_LOGGED):
            log.add([IgnoredField("ChatRequest", repr(str(number)))])
    assert len(caplog.records) == MAX_LOGGED + 1
    assert caplog.records[-1].getMessage() == "further ignored fields are not logged"


@pytest.mark.parametrize("strict", [False, True])
def test_the_document_says_whether_unknown_fields_are_refused(strict: bool) -> None:
    async def scenario(app: App) -> None:
        schemas = app.app.openapi()["components"]["schemas"]
        for name in ("ChatRequest", "Message", "TextPart", "Tool"):
            assert schemas[name]["additionalProperties"] is not strict
        schema_or_null = schemas["JsonSchema"]["properties"]["schema"]["anyOf"]
        assert schema_or_null[0]["additionalProperties"] is True

        answered = app.post(CHAT, frobnicate=1)
        if strict:
            await answered.done
            assert_is_error(answered, 400, param="frobnicate", code="extra_forbidden")
        else:
            app.worker.answer_with(token_replies("a"))
            await answered.done
            assert answered.status == 200

    run_with_app(scenario, config=replace(CONFIG, strict_fields=strict))
