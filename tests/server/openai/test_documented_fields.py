"""OpenAI's types, docs/openai.md and the server have each other's fields."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from minisgl.message import UserReply
from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.completions import CompletionRequest
from minisgl.server.openai.embeddings import EmbeddingRequest
from minisgl.server.openai.responses_request import ResponsesRequest
from tests.server.harness import (
    BODIES,
    CHAT,
    RESPONSES,
    TEXT,
    App,
    assert_is_error,
    run_with_app,
    token_replies,
)
from tests.server.http.test_openapi import document_of

TABLES_ARE_OF = "3.54"  # the client's release, which the head of docs/openai.md names
EMBED = "/v1/embeddings"
NEEDED: dict[str, dict[str, Any]] = {**BODIES, EMBED: {"model": "m", "input": "hi"}}
KINDS: dict[str, Any] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    RESPONSES: ResponsesRequest,
    EMBED: EmbeddingRequest,
}
OPENAIS: dict[str, Any] = {
    CHAT: chat_create_params.CompletionCreateParamsStreaming,
    TEXT: completion_create_params.CompletionCreateParamsStreaming,
    RESPONSES: response_create_params.ResponseCreateParamsStreaming,
    EMBED: embedding_create_params.EmbeddingCreateParams,
}
HEADINGS = {
    CHAT: [f"`POST {CHAT}` and `POST {TEXT}`", "Chat only"],
    TEXT: [f"`POST {CHAT}` and `POST {TEXT}`", "Text only"],
    RESPONSES: [f"`POST {RESPONSES}`"],
    EMBED: [f"`POST {EMBED}`"],
}
REFUSED: dict[str, dict[str, Any]] = {  # a value that would change the answer
    CHAT: {
        "best_of": 3,
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy"},
        "reasoning_effort": "low",
        "verbosity": "low",
        "web_search_options": {},
        "moderation": {"model": "omni-moderation-latest"},
        "prompt_cache_options": {"mode": "explicit"},
    },
    TEXT: {"best_of": 3, "suffix": "x"},
    RESPONSES: {
        "text.verbosity": "low",
        "truncation": "auto",
        "background": True,
        "background_options": {},
        "previous_response_id": "resp_1",
        "conversation": "conv_1",
        "prompt": {"id": "pmpt_1"},
        "reasoning.effort": "low",
        "reasoning.summary": "auto",
        "reasoning.generate_summary": "auto",
        "max_tool_calls": 1,
        "context_management": [{"type": "compaction"}],
        "prompt_cache_options": {"mode": "explicit"},
        "access_programs": ["x"],
        "image": {},
        "moderation": {"model": "omni-moderation-latest"},
    },
    EMBED: {"dimensions": 3},
}
ACCEPTED: dict[
    str, list[Any]
] = {  # never change an answer: good values, and values of another type
    "user": ["u", ["x"], 5, "\0"],
    "metadata": [{"a": "b"}, 5, {"a": 1}, {"a": float("nan")}],
    "store": [True, "banana", 1],
    "service_tier": ["flex", 5],
    "safety_identifier": ["s", {}],
    "prompt_cache_key": ["k", 5],
    "prompt_cache_retention": ["24h", True],
}
PREDICTION: list[Any] = [
    {"type": "content", "content": "x"},
    {"type": "content"},
    {"type": "text", "content": "x"},
    5,
]


def documented(route: str) -> dict[str, str]:
    """The fields of a route's tables, with their dots, and what becomes of them."""
    _, *sections = re.split(r"(?m)^#+ ", (Path(__file__).parents[3] / "docs/openai.md").read_text())
    texts = dict(section.split("\n", 1) for section in sections)
    rows = [
        row
        for heading in HEADINGS[route]
        for row in re.findall(r"(?m)^\| (`.*?) \| (\w+) \|", texts[heading])
    ]
    return {name: fate for names, fate in rows for name in re.findall("`(.*?)`", names)}


def first(names: Any) -> set[str]:
    return {name.split(".")[0] for name in names}


def nested(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


@pytest.mark.parametrize("route", KINDS)
def test_the_tables_have_all_of_openais_fields(route: str) -> None:
    """A field that a later release of the client adds is refused by name, as any unknown field."""
    openais = OPENAIS[route].__required_keys__ | OPENAIS[route].__optional_keys__
    unknown = openais - first(documented(route))
    if _release(openai.__version__) <= _release(TABLES_ARE_OF):
        assert not unknown

    async def scenario(app: App) -> None:
        for name in [*unknown, "a_field_of_tomorrow"]:
            call = app.post(route, **{**NEEDED[route], name: {}})
            await call.done
            assert_is_error(call, 400, param=name, code="extra_forbidden")

    run_with_app(scenario)


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


@pytest.mark.parametrize("route", KINDS)
def test_the_document_has_the_fields_of_the_tables_and_no_others(route: str) -> None:
    async def scenario(app: App) -> None:
        schema = (await document_of(app))["components"]["schemas"][KINDS[route].__name__]
        assert schema["additionalProperties"] is False
        assert schema["properties"].keys() == first(documented(route))

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for route, kind in KINDS.items() for name in kind.model_fields],
)
def test_null_is_the_same_as_absent(route: str, name: str) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, finish="length", embedding=bytes(8))]
        )
        call = app.post(route, **{**NEEDED[route], name: None})
        await call.done
        if name in NEEDED[route]:
            assert_is_error(call, 400, param=name)
        else:
            assert call.status == 200, call.body

    run_with_app(scenario)


def test_a_text_completion_without_a_limit_has_sixteen_tokens() -> None:
    for fields in ({}, {"max_tokens": None}):
        assert CompletionRequest.model_validate({**NEEDED[TEXT], **fields}).token_limit == 16


@pytest.mark.parametrize("route", KINDS)
def test_what_the_tables_call_refused_has_a_value_here(route: str) -> None:
    refused = [name for name, fate in documented(route).items() if fate == "refused"]
    assert first(REFUSED[route]) == first(refused)


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [(route, name, value) for route, fields in REFUSED.items() for name, value in fields.items()],
)
def test_what_would_change_an_answer_is_refused_by_name(route: str, name: str, value: Any) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, **{**NEEDED[route], **nested(name, value)})
        await call.done
        error = assert_is_error(call, 400, param=name, code="unsupported_parameter")
        assert name in error["message"]

    run_with_app(scenario)


async def assert_takes_the_first_only(app: App, route: str, name: str, values: list[Any]) -> None:
    good = app.post(route, **{name: values[0]})
    await good.done
    assert good.status == 200, good.body
    for bad in values[1:]:
        call = app.post(route, **{name: bad})
        await call.done
        error = assert_is_error(call, 400)
        assert error["param"].split(".")[0] == name
        assert json.loads(call.body)["error"]["code"] != "unsupported_parameter"


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES])
def test_what_is_accepted_has_a_type(route: str, name: str) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        await assert_takes_the_first_only(app, route, name, ACCEPTED[name])

    run_with_app(scenario)


def test_a_prediction_has_a_type() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        await assert_takes_the_first_only(app, CHAT, "prediction", PREDICTION)

    run_with_app(scenario)


def test_the_document_has_the_values_that_change_nothing() -> None:
    async def scenario(app: App) -> None:
        schemas = (await document_of(app))["components"]["schemas"]
        assert schemas["ChatRequest"]["properties"]["functions"]["enum"] == [[], None]
        assert schemas["ChatRequest"]["properties"]["audio"]["enum"] == [None]
        assert schemas["ResponsesRequest"]["properties"]["background"]["enum"] == [False, None]
        assert schemas["ResponsesRequest"]["properties"]["input"]["anyOf"][0] == {"type": "string"}

    run_with_app(scenario)
