"""Tools against real processes: a forced call comes, whatever the model would generate."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.system.harness import MODEL, Program, small_server, wait_until

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{{ tools | tojson }}"
    "{% for turn in messages %}{{ turn.content }}{% endfor %} <tool_call> [TOOL_CALLS]"
)
CLOSED = {"type": "object", "additionalProperties": False}
CITY = {**CLOSED, "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
SCHEMAS = {"weather": CITY, "time": CLOSED}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ARGUMENTS = {"weather": [{"city": "Ulm"}, {"city": "Bonn"}], "time": [{}]}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the dog"}],
    "max_tokens": 400,
}


@pytest.fixture(scope="module", params=["described", "hermes", "llama3_json", "mistral"])
def server(
    request: pytest.FixtureRequest,
    folder: Path,
    running_server: Callable[[], Program],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Program]:
    """A server for each format, and one whose template shows no tools."""
    if request.param == "described":
        yield running_server()
        return
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("tools") / "model")
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    argv = small_server(copy, "--tool-call-parser", request.param, "--reasoning-parser", "qwen3")
    with Program(*argv) as program:
        yield program.wait_ready()


@pytest.mark.parametrize(
    "options", [{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}]
)
def test_a_forced_call_comes_and_a_stream_is_the_same(
    server: Program, options: dict[str, Any]
) -> None:
    no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    with server.client() as client:
        for seed in range(3):
            asked: dict[str, Any] = {
                **ASK,
                **options,
                "seed": seed,
                "tools": TOOLS,
                "extra_body": no_thinking,
            }
            whole = client.chat.completions.create(**asked).choices[0].message
            with client.chat.completions.stream(**asked) as stream:
                streamed = stream.get_final_completion().choices[0].message
            assert whole.content is None
            assert whole.tool_calls
            assert streamed.tool_calls
            (call,) = whole.tool_calls
            (again,) = streamed.tool_calls
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            assert call.function.name == again.function.name
            assert call.function.arguments == again.function.arguments
            assert json.loads(call.function.arguments) in ARGUMENTS[call.function.name]
            if options["tool_choice"] == NAMED:
                assert call.function.name == "weather"
    wait_until(server.is_idle, "no request is open")


def test_a_schema_that_cannot_be_followed_is_a_400(server: Program) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    with (
        server.client() as client,
        pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refusal,
    ):
        client.chat.completions.create(tools=tools, tool_choice="required", **ASK)
    assert refusal.value.param == "tools"


def test_tools_are_shown_and_strict_ones_leave_a_choice(server: Program) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS
    ]
    with server.client() as client:
        # A sampled answer may end before its first word.
        whole: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
        asked: dict[str, Any] = {**ASK, **whole, "max_tokens": 8, "tools": tools}
        answer = client.chat.completions.create(tool_choice="auto", **asked)
        without_tools = client.chat.completions.create(tool_choice="none", **asked)
    assert answer.choices[0].message.content
    assert answer.usage
    assert without_tools.usage
    assert answer.usage.prompt_tokens > without_tools.usage.prompt_tokens


NO_THINKING: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
FORCED: dict[str, Any] = {
    **NO_THINKING,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "model": MODEL,
}


def use(name: str, arguments: str) -> str:
    """What the tool of that name returns."""
    tools: dict[str, Any] = {"weather": lambda city: f"sun in {city}", "time": lambda: "noon"}
    result: str = tools[name](**json.loads(arguments))
    return result


@pytest.mark.parametrize("as_json", [False, True])
def test_a_chat_goes_on_with_a_tools_result(server: Program, as_json: bool) -> None:
    turns: list[Any] = list(ASK["messages"])
    with server.client() as client:
        chosen = client.chat.completions.create(
            messages=turns, max_tokens=400, tools=TOOLS, **FORCED
        ).choices[0]
        assert chosen.finish_reason == "tool_calls"
        assert chosen.message.tool_calls
        (call,) = chosen.message.tool_calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        result = use(call.function.name, call.function.arguments)
        turns += [chosen.message.model_dump(exclude_none=True) if as_json else chosen.message]
        turns += [{"role": "tool", "tool_call_id": call.id, "content": result}]
        plain: dict[str, Any] = {
            "model": MODEL,
            "tools": TOOLS,
            "tool_choice": "none",
            "temperature": 0,
            **NO_THINKING,
        }
        answer = client.chat.completions.create(messages=turns, max_tokens=8, **plain)
        without_result = client.chat.completions.create(messages=turns[:-1], max_tokens=8, **plain)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
    assert answer.usage
    assert without_result.usage
    assert answer.usage.prompt_tokens > without_result.usage.prompt_tokens


def test_a_response_goes_on_with_a_tools_result(server: Program) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    turns: list[Any] = list(ASK["messages"])
    with server.client() as client:
        first = client.responses.create(input=turns, max_output_tokens=400, tools=tools, **FORCED)
        (call,) = first.output
        assert call.type == "function_call"
        assert first.status == "completed"
        turns += [
            call,
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": use(call.name, call.arguments),
            },
        ]
        plain: dict[str, Any] = {
            "model": MODEL,
            "tools": tools,
            "tool_choice": "none",
            "temperature": 0,
            **NO_THINKING,
        }
        answer = client.responses.create(input=turns, max_output_tokens=8, **plain)
        without_result = client.responses.create(input=turns[:-1], max_output_tokens=8, **plain)
    assert answer.output_text
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage
    assert without_result.usage
    assert answer.usage.input_tokens > without_result.usage.input_tokens


def test_a_call_comes_in_pieces_to_a_client_that_does_not_block(server: Program) -> None:
    async def pieces() -> list[Any]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            asked: Any = {"messages": ASK["messages"], "max_tokens": 400, "tools": TOOLS, **FORCED}
            stream = await client.chat.completions.create(stream=True, **asked)
            return [chunk.choices[0] async for chunk in stream]

    choices = asyncio.run(pieces())
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert [bool(delta.id) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert choices[-1].finish_reason == "tool_calls"
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    assert use(deltas[0].function.name, arguments) in ("noon", "sun in Ulm", "sun in Bonn")
