"""The cost of validation: few errors and few looks at the values, whatever a body has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from minisgl.errors import InvalidRequest
from minisgl.server.answers.errors import MAX_ERROR_TEXT, ErrorBody
from minisgl.server.anthropic import MessagesRequest
from minisgl.server.http.body_parser import parse_body
from minisgl.server.native.generate import GenerateRequest
from minisgl.server.native.tokenize import DetokenizeRequest, TokenizeRequest
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest
from minisgl.server.openai.embeddings import EmbeddingRequest
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.requests.validation import (
    FITS_CONTEXT,
    AtMost,
    RequestBounds,
    RequestContext,
    RequestModel,
)

MANY = 20_000
MOST_ERRORS = 200  # a few for each field
BOUNDS = RequestBounds(max_tokens=100, max_prompts=8)
TURN = {"role": "user", "content": "hi"}
OVERFLOW = (
    "This model's maximum context length is 100 tokens. However, you sent 101 items of at least "
    "one token each. Please reduce the length of the messages or completion."
)
CHAT: dict[str, Any] = {"model": "m", "messages": [TURN]}


def errors_of(model: type[BaseModel], body: dict[str, Any], bounds: RequestBounds) -> list[Any]:
    """The errors of a server that refuses unknown fields."""
    context = RequestContext(replace(bounds, strict_fields=True))
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body, context=context, extra="forbid")
    return caught.value.errors()


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"model": "m", "prompt": [-1] * MANY}),
        (CompletionRequest, {"model": "m", "prompt": [[-1]] * MANY}),
        (CompletionRequest, {"model": "m", "prompt": [None] * MANY}),
        (CompletionRequest, {"model": "m", "prompt": "a", "stop": [None] * MANY}),
        (CompletionRequest, {"model": "m", "prompt": "a", **{f"x{i}": 0 for i in range(MANY)}}),
        (EmbeddingRequest, {"model": "m", "input": [-1] * MANY}),
        (GenerateRequest, {"prompt": [-1] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
        (TokenizeRequest, {"messages": [None] * MANY}),
        (ChatRequest, {"model": "m", "messages": [None] * MANY}),
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": [None] * MANY}]}),
        (ChatRequest, {"model": "m", "messages": [{f"x{i}": 0 for i in range(MANY)}]}),
        (ChatRequest, {**CHAT, "tools": [None] * MANY}),
        (ChatRequest, {**CHAT, "guided_choice": [None] * MANY}),
        (ChatRequest, {**CHAT, "metadata": {f"x{i}": 0 for i in range(MANY)}}),
        (ChatRequest, {**CHAT, "logit_bias": {f"x{i}": "" for i in range(MANY)}}),
        (ChatRequest, {**CHAT, "guided_json": {"enum": [0] * 2 * MANY}}),
        (ResponsesRequest, {"model": "m", "input": [None] * MANY}),
        (ResponsesRequest, {"model": "m", "input": "a", "include": [None] * MANY}),
        (ResponsesRequest, {"model": "m", "input": "a", "tools": [None] * MANY}),
        (ResponsesRequest, {"model": "m", "input": [{"role": "user", "content": [None] * MANY}]}),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_value_of_many_errors_has_few(model: type[BaseModel], body: dict[str, Any]) -> None:
    for bounds in (RequestBounds(), BOUNDS):
        errors = errors_of(model, body, bounds)
        assert len(errors) <= MOST_ERRORS


def test_a_list_is_counted_before_its_items_are_looked_at() -> None:
    seen: list[int] = []
    few = Annotated[list[Annotated[int, AfterValidator(seen.append)]], AtMost(3)]
    with pytest.raises(ValidationError, match=r"4 items; at most 3"):
        TypeAdapter(few).validate_python([1, 2, 3, 4])
    assert seen == []


def test_the_first_bad_item_ends_a_list() -> None:
    seen: list[Any] = []

    def check(item: int) -> int:
        seen.append(item)
        raise ValueError("bad")

    numbers = Annotated[list[Annotated[int, AfterValidator(check)]], AtMost(MANY)]
    with pytest.raises(ValidationError):
        TypeAdapter(numbers).validate_python(list(range(MANY)))
    assert seen == [0]


@pytest.mark.parametrize(("count", "fits"), [(100, True), (101, False)])
def test_a_list_of_a_request_has_the_bound_of_the_model(count: int, fits: bool) -> None:
    adapter = TypeAdapter(Annotated[list[int], FITS_CONTEXT])
    if fits:
        assert len(adapter.validate_python([5] * count, context=RequestContext(BOUNDS))) == count
        return
    with pytest.raises(ValidationError, match=r"length is 100 tokens\. .* 101 items"):
        adapter.validate_python([5] * count, context=RequestContext(BOUNDS))


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("prompt", ["a"] * 9, 8),
        ("prompt", [[5]] * 9, 8),
        ("stop", ["a"] * 33, 32),
        ("stop_token_ids", [5] * 33, 32),
        ("logit_bias", {str(i): 0 for i in range(1025)}, 1024),
    ],
)
def test_an_error_names_the_bound(field: str, value: Any, bound: int) -> None:
    errors = errors_of(CompletionRequest, {"model": "m", "prompt": "a", field: value}, BOUNDS)
    messages = [error["msg"] for error in errors]
    assert any(f"at most {bound} may be sent" in message for message in messages)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([5] * 101, "prompt: " + OVERFLOW),
        (["a"] * 9, "prompt: it has 9 items; at most 8 may be sent"),
        ([[5]] * 9, "prompt: it has 9 items; at most 8 may be sent"),
        ([[5], [5] * 101], "prompt.1: " + OVERFLOW),
        ([5, -1], "prompt.1: it must be >= 0, got -1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_of_the_forms_of_a_prompt_the_one_that_was_sent_is_named(prompt: Any, reason: str) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    with pytest.raises(InvalidRequest) as refusal:
        parse_body(body, CompletionRequest, BOUNDS)
    assert str(refusal.value) == reason


def test_of_unknown_fields_the_first_is_named() -> None:
    class Small(RequestModel):
        a: int = 0

    unknown = {f"x{i}": 0 for i in range(MANY)}
    (error,) = errors_of(Small, {"a": 1, **unknown}, BOUNDS)
    assert (error["type"], error["loc"]) == ("extra_forbidden", ("x0",))


def test_an_error_repeats_an_excerpt_only() -> None:
    long = "a" * MANY + "the end"
    error = ErrorBody(message=long, type="x", param=long)
    for text in (error.message, error.param):
        assert text is not None
        assert len(text) < MAX_ERROR_TEXT + 10
        assert text.endswith("the end")


HISTORY = {
    "model": "m",
    "max_tokens": 1,
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ],
}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
SHORT_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (
            ResponsesRequest,
            {"model": "m", "input": [{"role": "user", "content": "a"}]},
            "input.0.type",
        ),
        (ResponsesRequest, {"model": "m", "input": "a", "text": {}}, "text.format"),
        (
            ChatRequest,
            {**CHAT, "response_format": SHORT_SCHEMA},
            "response_format.json_schema.schema",
        ),
        (
            ChatRequest,
            {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
            "messages.1.tool_calls.0.type",
        ),
        (MessagesRequest, HISTORY, "messages.2.content.0.content"),
    ],
)
def test_null_is_what_a_field_is_where_it_is_left_out(
    kind: Any, body: dict[str, Any], place: str
) -> None:
    """Clients that dump what they have send it."""
    with_null = json.loads(json.dumps(body))
    *names, last = place.split(".")
    part = with_null
    for name in names:
        part = part[int(name) if name.isdecimal() else name]
    assert last not in part
    part[last] = None
    request = kind.model_validate(with_null)
    expected = kind.model_validate(body)
    assert request.prompts() == expected.prompts()
    assert request.sampling({}) == expected.sampling({})
