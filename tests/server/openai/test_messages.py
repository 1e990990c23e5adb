"""Messages: which turns are accepted, and what the chat template gets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.server.openai.chat import ChatRequest
from tests.server.openai.harness import read

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP = '{"a": ' * 65 + "1" + "}" * 65


def turn(**fields: Any) -> Any:
    """What the template gets for an assistant's message."""
    (conversation,) = read(ChatRequest, messages=[{"role": "assistant", **fields}]).prompts()
    return conversation.messages[0]


def test_the_name_of_a_speaker_goes_to_the_template() -> None:
    (conversation,) = read(
        ChatRequest, messages=[{"role": "user", "content": "x", "name": "Ada"}]
    ).prompts()
    assert conversation.messages == [{"role": "user", "content": "x", "name": "Ada"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("\1 \u2028 👍", "\1 \u2028 👍"),
    ],
)
def test_content_is_text_or_text_parts(content: Any, text: str) -> None:
    (conversation,) = read(ChatRequest, messages=[{"role": "user", "content": content}]).prompts()
    assert conversation.messages == [{"role": "user", "content": text}]


def test_a_developer_is_a_system() -> None:
    roles = ["developer", "system", "user", "assistant"]
    (conversation,) = read(
        ChatRequest, messages=[{"role": role, "content": "x"} for role in roles]
    ).prompts()
    assert [turn["role"] for turn in conversation.messages] == [
        "system",
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hello",
        None,
        ["hello"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "tool", "tool_call_id": "1"}],
        [{"role": "user", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "user", "content": "x", "reasoning_content": "Hm"}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}],
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}],
        [
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
            }
        ],
        [{"role": "assistant", "tool_calls": [{**CALL, "id": "\ud83d"}]}],
        [{"role": "assistant", "content": "x", "refusal": "no"}],
        [{"role": "User", "content": "x"}],
        [{"role": None, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(ChatRequest, messages=messages)
    assert error.value.errors()[0]["loc"][0] == "messages"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "tool"}, "tool_call_id is required of a tool"),
        ({"role": "tool", "tool_call_id": None}, "tool_call_id is required of a tool"),
        ({"role": "user", "tool_call_id": "1"}, "a tool, and nobody else, has a tool_call_id"),
    ],
    ids=["absent", "null", "of a user"],
)
def test_a_result_names_its_call(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        read(ChatRequest, messages=[{**message, "content": "x"}])


def test_calls_and_their_results_go_to_the_template() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": [1, null]}'}}
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call, CALL],
            "refusal": None,
            "audio": None,
            "reasoning_content": "Hm",
        },
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "42"}],
            "name": "f",
        },
    ]
    (conversation,) = read(ChatRequest, messages=messages).prompts()
    calls = [
        {**CALL, "function": {"name": "f", "arguments": arguments}}
        for arguments in ({"x": [1, None]}, {})
    ]
    assert conversation.messages == [
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "42", "name": "f"},
    ]
    assert turn(tool_calls=[CALL]) == turn(content="", tool_calls=[CALL])


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "[1]", "null", '{"a": 1e999', '{"a": %s}' % 10**30, '{"a": "\\ud83d"}', DEEP],
)
def test_arguments_that_are_no_object_to_send_on_stay_text(arguments: str) -> None:
    (call,) = turn(tool_calls=[{**CALL, "function": {"name": "f", "arguments": arguments}}])[
        "tool_calls"
    ]
    assert call["function"]["arguments"] == arguments
