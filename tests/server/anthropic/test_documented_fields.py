"""Anthropic's types, docs/anthropic.md and the server have each other's fields."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl.server.anthropic import CountTokensRequest, MessagesRequest
from tests.server.anthropic.test_messages import ASKED, COUNT, ROUTE
from tests.server.harness import App, HttpCall, run_with_app, token_replies

TABLES_ARE_OF = (2, 14)  # the client's release, which the head of docs/anthropic.md names
HEADERS = {"betas", "user_profile_id", "workspace_id"}  # the client sends these as headers
REFUSED: dict[str, Any] = {
    "add_generation_prompt": False,
    "audio": {"voice": "alloy"},
    "best_of": 2,
    "compaction": {"type": "summarize"},
    "container": "c",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "continue_final_message": True,
    "conversation": "conv_1",
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "input": "x",
    "instructions": "x",
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "mcp_servers": [{"type": "url", "url": "https://a.org", "name": "a"}],
    "modalities": ["audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "output_config.task_budget": {"type": "tokens", "total": 5},
    "previous_response_id": "resp_1",
    "prompt": "x",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "suffix": "x",
    "text": {"format": {"type": "json_object"}},
    "thread": {"type": "create"},
    "top_logprobs": 2,
    "truncation": "auto",
    "verbosity": "low",
    "web_search_options": {},
}
CHANGES_NOTHING: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "function_call": "auto",
    "functions": [],
    "logprobs": False,
    "mcp_servers": [],
    "modalities": ["text"],
    "n": 1,
    "reasoning": {},
    "response_format": {"type": "text"},
    "suffix": "",
    "top_logprobs": 0,
    "truncation": "disabled",
    "verbosity": "medium",
}


def documented() -> dict[str, str]:
    """The fields of the table, with their dots, and what becomes of them."""
    text = (Path(__file__).parents[3] / "docs/anthropic.md").read_text()
    rows = re.findall(r"(?m)^\| (`.*?) \| (\w+) \|", text)
    return {name: fate for names, fate in rows for name in re.findall("`(.*?)`", names)}


def first(names: Any) -> set[str]:
    return {name.split(".")[0] for name in names}


def nested(name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


async def message_of_refusal(call: HttpCall) -> str:
    await call.done
    assert call.status == 400, call.body
    error = json.loads(call.body)["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


def test_the_table_and_the_requests_have_all_of_anthropics_fields() -> None:
    import anthropic
    from anthropic.types.beta import message_count_tokens_params, message_create_params

    if tuple(map(int, anthropic.__version__.split(".")[:2])) > TABLES_ARE_OF:
        pytest.skip("the client is newer than the table")
    params: Any = message_create_params.MessageCreateParamsStreaming
    counted: Any = message_count_tokens_params.MessageCountTokensParams
    for fields, kind in ((params, MessagesRequest), (counted, CountTokensRequest)):
        names = (fields.__required_keys__ | fields.__optional_keys__) - HEADERS
        assert not names - first(documented())
        assert not names - kind.model_fields.keys()


def test_what_the_table_calls_refused_has_a_value_here() -> None:
    assert REFUSED.keys() == {name for name, fate in documented().items() if fate == "refused"} - {
        "citations"  # of a text block
    }


def test_what_would_change_an_answer_is_refused_by_name() -> None:
    async def scenario(app: App) -> None:
        for name, value in REFUSED.items():
            message = await message_of_refusal(app.post(ROUTE, **{**ASKED, **nested(name, value)}))
            assert message.startswith(f"{name}: it is not supported"), message

    run_with_app(scenario)


def test_what_changes_nothing_is_accepted() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("a"))
        nulls = {name: None for name in REFUSED if "." not in name}
        accepted = {
            "billing_policy": {"type": "billing_policy", "bill_to": "self"},
            "diagnostics": {"previous_message_id": "m"},
            "fallback_credit_token": "t",
            "fallbacks": "default",
            "inference_geo": "eu",
            "metadata": {"user_id": None},
        }
        for fields in (nulls, CHANGES_NOTHING, accepted):
            call = app.post(ROUTE, **{**ASKED, **fields})
            await call.done
            assert call.status == 200, call.body

    run_with_app(scenario)


def test_counting_refuses_what_would_change_the_prompt() -> None:
    async def scenario(app: App) -> None:
        asked = {name: ASKED[name] for name in ("model", "messages")}
        for name in ("mcp_servers", "prompt", "instructions"):
            message = await message_of_refusal(app.post(COUNT, **asked, **{name: REFUSED[name]}))
            assert message.startswith(f"{name}: ")

    run_with_app(scenario)
