"""Tools against real processes: calls that have to come do, whatever the model would like to say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.system.harness import MODEL, Program, eventually, small

pytestmark = pytest.mark.slow
TEMPLATE = "{{ tools | tojson }}{% for turn in messages %}{{ turn.content }}{% endfor %} <tool_call> [TOOL_CALLS]"
CLOSED = {"type": "object", "additionalProperties": False}
CITY = {**CLOSED, "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
SCHEMAS = {"weather": CITY, "time": CLOSED}
TOOLS: list[Any] = [{"type": "function", "function": {"name": it, "parameters": SCHEMAS[it]}} for it in SCHEMAS]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the dog"}], "max_tokens": 400}


@pytest.fixture(scope="module", params=["hermes", "llama3_json", "mistral"])
def server(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("tools") / "model")
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    argv = small(copy, "--tool-call-parser", request.param, "--reasoning-parser", "qwen3")
    with Program(*argv) as program:
        yield program.wait_ready()


@pytest.mark.parametrize("options", [{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}])
def test_a_call_that_has_to_come_does_and_a_stream_is_the_same(server: Program, options: dict[str, Any]) -> None:
    thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
    with server.client() as client:
        for seed in range(3):
            asked: dict[str, Any] = {**ASK, **options, "seed": seed, "tools": TOOLS, "extra_body": thoughtless}
            whole = client.chat.completions.create(**asked).choices[0].message
            with client.chat.completions.stream(**asked) as stream:
                streamed = stream.get_final_completion().choices[0].message
            assert whole.content is None and whole.tool_calls and streamed.tool_calls
            (said,), (again,) = whole.tool_calls, streamed.tool_calls
            assert isinstance(said, ChatCompletionMessageFunctionToolCall)
            assert (said.function.name, said.function.arguments) == (again.function.name, again.function.arguments)
            cities = [{}] if said.function.name == "time" else [{"city": "Ulm"}, {"city": "Bonn"}]
            assert json.loads(said.function.arguments) in cities
            assert said.function.name == "weather" or options["tool_choice"] != NAMED
    eventually(server.has_all_places, "the engine is free again")


def test_a_schema_that_cannot_be_followed_is_a_400(server: Program) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    with server.client() as client, pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refusal:
        client.chat.completions.create(tools=tools, tool_choice="required", **ASK)
    assert refusal.value.param == "tools"
