"""The words about a bad request: its field, the value and the bound, in JSON's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.errors import InvalidRequest
from minisgl.server.anthropic import MessagesRequest
from minisgl.server.http.body_parser import parse_body
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.validation import RequestBounds
from minisgl.server.requests.validation_errors import _locate, quote

MANY = 20_000
REQUIRED: dict[type[PromptRequest], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    MessagesRequest: {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hi"}],
    },
    ResponsesRequest: {"model": "m", "input": "hi"},
}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (ChatRequest, {"stop": 3}, "stop: it must be a string or a list, got 3"),
        (ChatRequest, {"stop": {"str": 1}}, "stop: it must be a string or a list, got an object"),
        (ChatRequest, {"n": 129}, "n: it must be <= 128, got 129"),
        (CompletionRequest, {"n": 0}, "n: it must be >= 1, got 0"),
        (
            ChatRequest,
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs: it must be <= 20, got 21",
        ),
        (
            ChatRequest,
            {"max_completion_tokens": 2**31},
            "max_completion_tokens: it must be <= 2147483647, got 2147483648",
        ),
        (ResponsesRequest, {"top_logprobs": -1}, "top_logprobs: it must be >= 0, got -1"),
        (ResponsesRequest, {"max_output_tokens": 0}, "max_output_tokens: it must be >= 1, got 0"),
        (MessagesRequest, {"max_tokens": 0}, "max_tokens: it must be >= 1, got 0"),
        (
            ChatRequest,
            {"stop_token_ids": [5, 2**31]},
            "stop_token_ids.1: it must be <= 2147483647, got 2147483648",
        ),
        (CompletionRequest, {"prompt": [5, -1]}, "prompt.1: it must be >= 0, got -1"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [7]}]},
            "messages.0.content.0: it must be an object, got 7",
        ),
        (ChatRequest, {"messages": []}, "messages: it has 0 items; at least 1 must be sent"),
        (
            ChatRequest,
            {"tool_choice": "any"},
            "tool_choice: it must be 'none', 'auto' or 'required', got \"any\"",
        ),
        (
            ChatRequest,
            {"tool_choice": 5},
            "tool_choice: it must be 'none', 'auto' or 'required' or an object, got 5",
        ),
        (ChatRequest, {"tools": [{"type": "function"}]}, "tools.0.function: it is required"),
        (
            ChatRequest,
            {"response_format": {"type": "xml"}},
            "response_format.type: it must be one of 'text', 'json_object', 'json_schema', "
            'got "xml"',
        ),
        (
            ChatRequest,
            {"response_format": {"type": None}},
            "response_format.type: it must be one of 'text', 'json_object', 'json_schema', "
            "got null",
        ),
        (
            MessagesRequest,
            {"tool_choice": {"type": [1]}},
            "tool_choice.type: it must be one of 'auto', 'any', 'none', 'tool', "
            "got a list of 1 items",
        ),
        (CompletionRequest, {"prompt": [1, "a"]}, 'prompt.1: it must be an integer, got "a"'),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt.1: it must be a string, got 1"),
        (CompletionRequest, {"prompt": [[5], 3]}, "prompt.1: it must be a list, got 3"),
        (
            CompletionRequest,
            {"prompt": [None]},
            "prompt.0: it must be a string, an integer or a list, got null",
        ),
        (
            ResponsesRequest,
            {"input": [5]},
            "input.0: it must be an object with a type that is a string",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "tool", "content": "hi"}]},
            "messages.0.role: it must be one of 'user', 'system', 'assistant', got \"tool\"",
        ),
        (
            MessagesRequest,
            {"messages": [{"content": "hi"}]},
            "messages.0: it must be an object with a role that is a string",
        ),
        (
            ResponsesRequest,
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "a"}}}},
            "text.format.name: it is required",
        ),
    ],
    ids=str,
)
def test_a_fault_is_said_in_plain_words(
    model: type[PromptRequest], fields: dict[str, Any], message: str
) -> None:
    body = json.dumps({**REQUIRED[model], **fields}).encode()
    with pytest.raises(InvalidRequest) as refusal:
        parse_body(body, model, RequestBounds(100, 8))
    assert str(refusal.value) == message
    assert str(refusal.value).startswith(f"{refusal.value.param}: ")


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ({"a": 1}, "an object"),
        ([1, 2], "a list of 2 items"),
        ("x" * 50, f'"{"x" * 40}" and 10 more characters'),
        ("\ud83d", '"\\ud83d"'),
        (10**5000, "an integer of 16610 bits"),
        (None, "null"),
        (1.5, "1.5"),
    ],
    ids=lambda value: str(type(value)),
)
def test_a_value_is_quoted_in_a_few_characters(value: Any, quoted: str) -> None:
    assert quote(value) == quoted


def test_the_path_of_a_field_compares_no_name_with_the_indexes_of_a_list() -> None:
    comparisons: list[object] = []

    class Branch(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            comparisons.append(other)
            return False

    fault = {"type": "int_type", "input": 0, "loc": ("prompt", Branch("list[int]"), 7)}
    assert _locate(fault, {"prompt": [0] * MANY}) == ("prompt", 7)
    assert len(comparisons) <= 1
