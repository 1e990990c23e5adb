"""OpenAI's types, docs/openai.md and the server have each other's fields."""

from __future__ import annotations

import json
import re
from dataclasses import replace
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
    CONFIG,
    RESPONSES,
    TEXT,
    App,
    assert_is_error,
    run_with_app,
    token_replies,
)
from tests.server.http.test_openapi import document_of

TABLES_ARE_OF = "3.57"  # the client's release, which the head of docs/openai.md names
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
OTHERS = "Fields of other servers"
OTHERS_OF_CHATS = "Fields of other servers about conversations"
HEADINGS = {
    CHAT: [f"`POST {CHAT}` and `POST {TEXT}`", "Chat only", OTHERS, OTHERS_OF_CHATS],
    TEXT: [f"`POST {CHAT}` and `POST {TEXT}`", "Text only", OTHERS],
    RESPONSES: [f"`POST {RESPONSES}`", OTHERS, OTHERS_OF_CHATS],
    EMBED: [f"`POST {EMBED}`"],
}
REFUSED_EVERYWHERE: dict[str, Any] = {
    "allowed_token_ids": [5],
    "audio_data": ["x"],
    "bad_words": ["x"],
    "custom_logit_processor": "x",
    "custom_params": {"x": 1},
    "do_sample": False,
    "dry_multiplier": 0.8,
    "dynatemp_range": 0.5,
    "extra_body": {"top_k": 5},
    "format": "json",
    "grammar": 'root ::= "a"',
    "guided_whitespace_pattern": " ?",
    "image_data": ["x"],
    "input_embeds": [[0.5]],
    "input_ids": [5],
    "kv_transfer_params": {},
    "length_penalty": 2,
    "logits_processors": ["x"],
    "lora_path": "x",
    "max_new_tokens": 5,
    "min_new_tokens": 5,
    "mirostat": 2,
    "n_predict": 5,
    "no_stop_trim": True,
    "num_predict": 5,
    "options": {"num_ctx": 5},
    "prompt_embeds": "x",
    "random_seed": 5,
    "repeat_penalty": 1.1,
    "return_hidden_states": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "samplers": ["top_k"],
    "sampling_params": {"top_k": 5},
    "session_params": {"id": "x"},
    "spaces_between_special_tokens": False,
    "stop_regex": ["x"],
    "stop_sequences": ["x"],
    "structural_tag": "x",
    "tfs_z": 0.9,
    "thinking_token_budget": 5,
    "top_a": 0.5,
    "truncate_prompt_tokens": 5,
    "typical_p": 0.9,
    "use_beam_search": True,
    "video_data": ["x"],
    "vllm_xargs": {"x": 1},
    "xtc_probability": 0.5,
}
REFUSED_IN_CHATS: dict[str, Any] = {
    **REFUSED_EVERYWHERE,
    "add_special_tokens": True,
    "chat_template": "{{ messages }}",
    "documents": [{"text": "x"}],
    "enable_search": True,
    "enable_thinking": False,
    "include_reasoning": False,
    "plugins": [{"id": "web"}],
    "safe_prompt": True,
    "separate_reasoning": False,
    "stream_reasoning": False,
    "system": "be brief",
    "thinking": {"type": "disabled"},
    "thinking_budget": 5,
}
REFUSED: dict[str, dict[str, Any]] = {  # a value that would change the answer
    CHAT: {
        **REFUSED_IN_CHATS,
        "best_of": 3,
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy"},
        "verbosity": "low",
        "web_search_options": {},
        "moderation": {"model": "omni-moderation-latest"},
        "prompt_cache_options": {"mode": "explicit"},
        "prompt": "x",
        "suffix": "x",
        "echo": True,
        "input": "x",
        "instructions": "x",
        "max_output_tokens": 5,
        "prompt_logprobs": 1,
        "reasoning": {"effort": "low"},
    },
    TEXT: {
        **REFUSED_EVERYWHERE,
        "best_of": 3,
        "suffix": "x",
        "add_special_tokens": False,
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 5,
        "top_logprobs": 2,
        "prompt_logprobs": 1,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "chat_template_kwargs": {"enable_thinking": False},
        "modalities": ["audio"],
        "verbosity": "low",
        "audio": {"voice": "alloy"},
        "reasoning_effort": "low",
        "web_search_options": {},
    },
    RESPONSES: {
        **REFUSED_IN_CHATS,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "n": 2,
        "best_of": 2,
        "response_format": {"type": "json_object"},
        "logprobs": True,
        "prompt_logprobs": 1,
        "echo": True,
        "suffix": "x",
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "modalities": ["audio"],
        "verbosity": "low",
        "audio": {"voice": "alloy"},
        "reasoning_effort": "low",
        "web_search_options": {},
        "text.verbosity": "low",
        "reasoning.mode": "pro",
        "truncation": "auto",
        "background": True,
        "background_options": {},
        "previous_response_id": "resp_1",
        "conversation": "conv_1",
        "prompt": {"id": "pmpt_1"},
        "max_tool_calls": 1,
        "context_management": [{"type": "compaction"}],
        "prompt_cache_options": {"mode": "explicit"},
        "access_programs": ["x"],
        "image": {},
        "moderation": {"model": "omni-moderation-latest"},
    },
    EMBED: {
        "dimensions": 3,
        "add_special_tokens": False,
        "embed_dtype": "float16",
        "endianness": "big",
        "input_type": "query",
        "messages": [{"role": "user", "content": "x"}],
        "normalize": False,
        "truncate_prompt_tokens": 5,
    },
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
    """A strict server refuses a field of a later release of the client, as any unknown field."""
    openais = OPENAIS[route].__required_keys__ | OPENAIS[route].__optional_keys__
    unknown = openais - first(documented(route))
    if _release(openai.__version__) <= _release(TABLES_ARE_OF):
        assert not unknown

    async def scenario(app: App) -> None:
        for name in [*unknown, "a_field_of_tomorrow"]:
            call = app.post(route, **{**NEEDED[route], name: {}})
            await call.done
            assert_is_error(call, 400, param=name, code="extra_forbidden")

    run_with_app(scenario, config=replace(CONFIG, strict_fields=True))


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


@pytest.mark.parametrize("route", KINDS)
def test_the_document_has_the_fields_of_the_tables_and_no_others(route: str) -> None:
    async def scenario(app: App) -> None:
        schema = (await document_of(app))["components"]["schemas"][KINDS[route].__name__]
        assert schema["properties"].keys() == first(documented(route))

    run_with_app(scenario)


@pytest.mark.parametrize("route", KINDS)
def test_null_is_the_same_as_absent(route: str) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(
            lambda msg: [UserReply(msg.uid, finish="length", embedding=bytes(8))]
        )
        for name, entry in KINDS[route].model_fields.items():
            call = app.post(route, **{**NEEDED[route], entry.alias or name: None})
            await call.done
            if name in NEEDED[route]:
                assert_is_error(call, 400, param=name)
            else:
                assert call.status == 200, (name, call.body)

    run_with_app(scenario)


def test_a_text_completion_without_a_limit_has_sixteen_tokens() -> None:
    for fields in ({}, {"max_tokens": None}):
        assert CompletionRequest.model_validate({**NEEDED[TEXT], **fields}).token_limit == 16


@pytest.mark.parametrize("route", KINDS)
def test_what_the_tables_call_refused_has_a_value_here(route: str) -> None:
    refused = [name for name, fate in documented(route).items() if fate == "refused"]
    assert first(REFUSED[route]) == first(refused)


@pytest.mark.parametrize("route", KINDS)
def test_what_would_change_an_answer_is_refused_by_name(route: str) -> None:
    async def scenario(app: App) -> None:
        for name, value in REFUSED[route].items():
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
