"""Clients of other projects against real processes, and Schemathesis on the OpenAPI schema."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from tests.system.harness import MODEL, TIMEOUT_S, Program, small_server, wait_until

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.slow
LITELLM = Path(sys.prefix) / "clients" / "bin" / "python"
QUESTION = "the dog says"


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "dog"]
    is_lazy: bool


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Program]:
    with Program(
        *small_server(folder, "--tool-call-parser", "hermes", "--max-seq-len", "2048")
    ) as program:
        yield program.wait_ready()
        wait_until(program.is_idle, "no request is open")


def langchain(server: Program, **options: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI  # it takes a second

    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=TIMEOUT_S,
        **{"temperature": 0, "max_tokens": 100, **options},
    )


def test_anthropics_client_chats_streams_and_calls_tools(server: Program) -> None:
    import anthropic  # it takes a second

    asked: Any = {
        "model": MODEL,
        "max_tokens": 20,
        "messages": [{"role": "user", "content": QUESTION}],
        "extra_body": {"temperature": 0},
    }
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"name": "weather", "input_schema": schema}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=TIMEOUT_S) as client:
        whole = client.messages.create(**asked)
        assert whole.stop_reason == "max_tokens"
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_text() == whole.content[0].text
        counted = client.messages.count_tokens(model=MODEL, messages=asked["messages"])
        assert counted.input_tokens == whole.usage.input_tokens

        choice = {"type": "tool", "name": "weather"}
        called = client.messages.create(
            **{**asked, "max_tokens": 200}, tools=tools, tool_choice=choice
        )
        (call,) = called.content
        assert (call.name, call.input, called.stop_reason) == (
            "weather",
            {"city": "Ulm"},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        asked["messages"] += [
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        assert client.messages.create(**asked, tools=tools).usage.output_tokens == 20


def test_anthropics_client_runs_tools_with_the_whole_conversation(server: Program) -> None:
    """Its runner asks for a thread first, which this server refuses."""
    import anthropic

    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Ulm"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"rain in {city}"

    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=TIMEOUT_S) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=200,
            max_iterations=2,
            messages=[{"role": "user", "content": QUESTION}],
            tools=[weather],
            tool_choice={"type": "tool", "name": "weather"},
        )
        answers = list(runner)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"]
    assert asked[0] == "Ulm"
    first, second = (answer.usage for answer in answers)
    prompts = [
        usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in (first, second)
    ]
    assert prompts[1] > prompts[0] + 10  # the call and its result came with the question


def test_anthropics_client_lists_the_model(server: Program) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=TIMEOUT_S) as client:
        (model,) = client.models.list()  # it would ask for a second page
        assert client.models.retrieve(MODEL) == model
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("other")
    assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
    assert model.created_at.tzinfo is not None
    assert (model.max_input_tokens, model.lifecycle) == (2048, "active")


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_chats(server: Program, use_responses_api: bool) -> None:
    model = langchain(server, use_responses_api=use_responses_api)
    whole = model.invoke(QUESTION)
    pieces = list(model.stream(QUESTION))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == whole.text != ""
    assert whole.usage_metadata is not None
    assert 0 < whole.usage_metadata["output_tokens"] <= 100
    assert [answer.text for answer in model.batch([QUESTION] * 3)] == [whole.text] * 3


def test_langchain_gets_objects(server: Program) -> None:
    structured = langchain(server, temperature=1, seed=3).with_structured_output(
        Animal, method="json_schema"
    )
    assert isinstance(structured.invoke(QUESTION), Animal)


def test_langchain_calls_tools(server: Program) -> None:
    from langchain_core.tools import tool

    @tool
    def weather(city: Literal["Ulm", "Bonn"]) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    model = langchain(server, temperature=1, seed=3, max_tokens=400)
    bound = model.bind_tools([weather], tool_choice="weather", strict=True)
    answer: Any = bound.invoke(QUESTION)
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Ulm", "Bonn")
    result = weather.invoke(call)
    final = langchain(server).bind_tools([weather]).invoke([("user", QUESTION), answer, result])
    assert isinstance(final.text, str)


def test_litellm(server: Program) -> None:
    """LiteLLM wants an older client of OpenAI's; scripts/test makes an environment for it."""
    if not LITELLM.exists():
        pytest.skip(f"{LITELLM} is missing; scripts/test makes it")
    script = Path(__file__).with_name("litellm_client.py")
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    command = [LITELLM, script, f"{server.url}/v1", MODEL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["streamed"] == seen["whole"] != ""
    assert seen["tokens"] == 30
    assert seen["after_history"] == 30
    assert seen["city"] in ("Ulm", "Bonn")
    assert seen["object"]["kind"] in ("fox", "dog")
    assert seen["error"] == 400
    assert "maximum context length is 2048 tokens" in seen["overflow"]


def test_schemathesis_finds_no_server_error(folder: Path) -> None:
    """Whatever the OpenAPI schema allows or nearly allows. Random bodies: test_fuzz.py."""
    options = ["--max-seq-len", "64", "--tool-call-parser", "hermes", "--num-tokenizer", "0"]
    with Program(*small_server(folder, *options)) as server:
        server.wait_ready()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        options = (
            "--checks not_a_server_error --phases coverage --seed 1 --generation-deterministic"
            " --suppress-health-check all --request-timeout 30 --no-color"
        )
        env = {
            **os.environ,
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        done = subprocess.run(
            command + options.split(),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            cwd=server.folder,
            env=env,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert re.search(r"([0-9]{4,}) generated, \1 passed", done.stdout)
        wait_until(server.is_idle, "no request is open")
