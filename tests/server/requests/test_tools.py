"""Tools: which are accepted, what the chat template gets, and what an answer may call."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.errors import InvalidRequest
from minisgl.server.openai.chat import ChatRequest
from tests.server.openai.harness import read


def nested(depth: int) -> dict[str, Any]:
    if depth <= 2:
        return {"type": "object"}
    return {"type": "object", "properties": {"a": nested(depth - 2)}}


def test_tools_go_to_the_template_unless_none_is_to_be_called() -> None:
    schema = {"type": "object", "properties": {"x": {}}}
    full = {"name": "f", "description": "F.", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function} for function in (full, {"name": "g"})]

    def shown(**fields: Any) -> Any:
        return read(ChatRequest, tools=tools, **fields).prompts()[0].tools

    assert shown() == [
        {"type": "function", "function": {"name": "f", "description": "F.", "parameters": schema}},
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    named = {"type": "function", "function": {"name": "g"}}
    assert (
        shown(tool_choice="required")
        == shown(tool_choice="auto")
        == shown(tool_choice=named)
        == shown()
    )
    assert shown(tool_choice="none") == []


@pytest.mark.parametrize(
    ("fields", "choice", "callable", "several"),
    [
        ({}, "auto", ["f", "g"], True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "auto", ["f", "g"], False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, "required", ["f", "g"], True),
        ({"tool_choice": "none"}, "none", [], True),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "required",
            ["g"],
            False,
        ),
    ],
)
def test_what_an_answer_may_call(
    fields: Any, choice: str, callable: list[str], several: bool
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    use = read(ChatRequest, tools=tools, **fields).tool_use
    assert (use.choice, [tool.name for tool in use.callable_tools], use.allows_several_calls) == (
        choice,
        callable,
        several,
    )
    assert use.is_enforced == (choice == "required")
    tools[1]["function"]["strict"] = True  # type: ignore[index]
    assert read(ChatRequest, tools=tools, **fields).tool_use.is_enforced == (choice != "none")


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"name": ""},
        {"name": "a b"},
        {"name": "f\n"},
        {"name": "x" * 129},
        {"name": "f", "description": 1},
        {"name": "f", "description": "\ud83d"},
        {"name": "f", "parameters": []},
        {"name": "f", "parameters": {"type": "string"}},
        {"name": "f", "parameters": {"type": ["object", "null"]}},
        {"name": "f", "parameters": {"title": "\ud83d"}},
        {"name": "f", "parameters": {"maximum": 10**30}},
        {"name": "f", "parameters": nested(66)},
        {"name": "f", "strict": "yes"},
    ],
    ids=lambda function: str(function)[:60],
)
def test_a_tool_of_another_shape_is_refused(function: Any) -> None:
    with pytest.raises(ValidationError) as error:
        read(ChatRequest, tools=[{"type": "function", "function": function}])
    assert error.value.errors()[0]["loc"][:3] == ("tools", 0, "function")


def test_tools_have_bounds() -> None:
    def offer(names: list[str], **fields: Any) -> Any:
        return read(
            ChatRequest,
            tools=[{"type": "function", "function": {"name": name}} for name in names],
            **fields,
        )

    assert len(offer([str(i) for i in range(128)]).tool_use.tools) == 128
    with pytest.raises(ValidationError, match="tools"):
        offer([str(i) for i in range(129)])
    function = {"name": "f-._1" + "x" * 123, "parameters": nested(64)}
    assert read(
        ChatRequest, tools=[{"type": "function", "function": function}]
    ).tool_use.callable_tools


@pytest.mark.parametrize(
    ("names", "choice", "param"),
    [
        ("ff", "auto", "tools"),
        ("f", {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ("", {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ("", "required", "tool_choice"),
    ],
)
def test_a_choice_that_does_not_suit_the_tools_is_refused(
    names: str, choice: Any, param: str
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    with pytest.raises(InvalidRequest) as refusal:
        read(ChatRequest, tools=tools, tool_choice=choice).prompts()
    assert refusal.value.param == param
