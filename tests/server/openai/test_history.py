"""Messages that came from a server and go back in as history, as clients send them."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from pydantic import ValidationError

from minisgl.server.openai.chat import ChatRequest
from minisgl.server.requests.validation import RequestBounds
from tests.server.openai.harness import BODIES, read

QUESTION = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALL_OF_TEMPLATE = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": 1}},
}
RECORDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what comes, what the template gets
    "openai model_dump": (
        ChatCompletionMessage(role="assistant", content="a").model_dump(),
        {"content": "a"},
    ),
    "openai parse": (
        {
            **ParsedChatCompletionMessage[Any](role="assistant", content="{}").model_dump(),
            "parsed": {"kind": "dog"},
        },
        {"content": "{}"},
    ),
    "openai stream of calls": (
        {
            "content": None,
            "parsed": None,
            "refusal": None,
            "tool_calls": [
                {
                    **CALL,
                    "index": 0,
                    "function": {**CALL["function"], "parsed_arguments": {"x": 1}},  # type: ignore[dict-item]
                }
            ],
        },
        {"content": "", "tool_calls": [CALL_OF_TEMPLATE]},
    ),
    "openai": (
        {
            "content": "a",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        {"content": "a"},
    ),
    "litellm": (
        {
            "content": "a",
            "tool_calls": None,
            "function_call": None,
            "reasoning_content": "Hm",
            "provider_specific_fields": {"refusal": None, "reasoning_content": "Hm"},
        },
        {"content": "a", "reasoning_content": "Hm"},
    ),
    "vllm": (
        {
            "content": "a",
            "reasoning": "Hm",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
        },
        {"content": "a", "reasoning_content": "Hm"},
    ),
    "both names of reasoning": (
        {"content": "a", "reasoning": "Hm", "reasoning_content": "Hm"},
        {"content": "a", "reasoning_content": "Hm"},
    ),
    "openrouter": (
        {"content": "a", "reasoning": "Hm", "reasoning_details": [{"type": "reasoning.text"}]},
        {"content": "a", "reasoning_content": "Hm"},
    ),
    "only reasoning": (
        {"content": None, "reasoning_content": "Hm"},
        {"content": "", "reasoning_content": "Hm"},
    ),
    "anthropic bridge": (
        {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"content": "a"},
    ),
    "a refusal": ({"content": None, "refusal": "No."}, {"content": "No."}),
    "a refusal in parts": (
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": "No."},
    ),
}


def history(turn: dict[str, Any]) -> Any:
    messages = [QUESTION, {"role": "assistant", **turn}, QUESTION]
    (conversation,) = read(ChatRequest, messages=messages).prompts()
    return conversation.messages


@pytest.mark.parametrize("name", RECORDED)
def test_an_answer_goes_back_in(name: str) -> None:
    turn, expected = RECORDED[name]
    assert history(turn) == [QUESTION, {"role": "assistant", **expected}, QUESTION]


@pytest.mark.parametrize(
    ("turn", "field", "advice"),
    [
        ({"content": None, "audio": {"id": "audio_1"}}, "audio", "send its transcript as content"),
        (
            {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
            "function_call",
            "send tool_calls",
        ),
        ({"content": "a", "prefix": True}, "prefix", "continue_final_message"),
        ({"content": "a", "partial": True}, "partial", "continue_final_message"),
        ({"content": "a", "images": ["x"]}, "images", "not supported"),
        ({"content": "a", "refusal": "No."}, "", "either content or refusal"),
        ({"content": "a", "reasoning": "1", "reasoning_content": "2"}, "", "differ"),
    ],
)
def test_what_would_change_the_prompt_is_refused_by_name(
    turn: dict[str, Any], field: str, advice: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        history(turn)
    (error,) = refusal.value.errors()
    assert error["loc"] == ("messages", 1, *([field] if field else []))
    assert advice in error["msg"]


def test_only_an_assistant_refuses_or_reasons() -> None:
    for turn in ({"refusal": "No."}, {"content": "a", "reasoning": "Hm"}):
        with pytest.raises(ValidationError, match="only an assistant"):
            read(ChatRequest, messages=[{"role": "user", **turn}])


def test_a_strict_server_takes_back_what_it_sends_itself() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm",
        "tool_calls": [CALL],
    }
    body = {**BODIES[ChatRequest], "messages": [QUESTION, answer]}
    assert ChatRequest.read(body, RequestBounds(strict_fields=True)).ignored_fields == []
