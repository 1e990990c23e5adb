"""Two thousand valid bodies with some fields spoilt: no 5xx, no hang, and nothing left open."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.system.harness import MODEL, Program, wait_until
from tests.system.oracle import text_after

pytestmark = pytest.mark.slow
NUM_BODIES = 2000
HANGS_S = 30.0
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
GENERATE = "/generate"
EMBED = "/v1/embeddings"
TOKENIZE = "/tokenize"
SAMPLING: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 3,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "n": 2,
    "best_of": 2,
    "stop": ["x", "yy"],
    "stop_token_ids": [3],
    "min_tokens": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "ignore_eos": True,
    "priority": -1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "me",
}
CALLED: list[Any] = [
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {
        **SAMPLING,
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            *CALLED,
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "text"},
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "tool_choice": "none",
        "parallel_tool_calls": False,
    },
    TEXT: {**SAMPLING, "prompt": ["a", "b"], "logprobs": 2, "echo": True, "suffix": ""},
    GENERATE: {
        **{
            name: value
            for name, value in SAMPLING.items()
            if name not in ("n", "best_of", "stream_options")
        },
        "prompt": "a b",
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
    EMBED: {
        "model": MODEL,
        "input": ["a", "b c"],
        "encoding_format": "base64",
        "dimensions": 64,
        "user": "me",
    },
    RESPONSES: {
        **{
            name: value
            for name, value in SAMPLING.items()
            if name not in ("max_tokens", "n", "best_of", "stream_options")
        },
        "max_output_tokens": 3,
        "input": [
            {"role": "developer", "content": "a"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "c"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
        "instructions": "be brief",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "reasoning": {"effort": None},
        "metadata": {"a": "b"},
        "store": False,
    },
    TOKENIZE: {"model": MODEL, "prompt": "a b", "add_special_tokens": False},
}
NASTY: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        300,
        2**31,
        2**63,
        -(2**63),
        10**30,
        0.0,
        -0.5,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "\0", "é" * 50, "\ud83d", "0", "null", "a" * 5000, "{{ 1 / 0 }}", "<|im_end|>"),
    *([], [None], [[]], [""], ["a", 1], [1, 2], [-1], [2**40], [[1], [2]], ["x"] * 40, [{}]),
    *(
        {},
        {"": ""},
        {"a": {"a": {"a": []}}},
        {"5": "x"},
        {"5": 1e999},
        {"\ud83d": 1},
        {"type": "json_schema"},
    ),
    *(
        {"role": "user"},
        [{"role": "user", "content": "\udc00"}],
        [{"role": "user", "content": "a", "x": 1}],
    ),
]
# Answers until the end of a long context: no hang, but they take far too long for a test.
ENDLESS = (None, 300, 2**31, 2**63, 10**30)


def spoil(value: Any, source: random.Random) -> Any:
    """A copy with one value changed, at any depth."""
    if isinstance(value, dict) and value and source.random() < 0.85:
        key = source.choice(list(value))
        match source.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {
                    **value,
                    source.choice(
                        ["x", "", "max_new_tokens", "\ud83d", "prompt", "messages"]
                    ): value[key],
                }
            case _:
                return {**value, key: spoil(value[key], source)}
    if isinstance(value, list) and value and source.random() < 0.6:
        place = source.randrange(len(value))
        return [*value[:place], spoil(value[place], source), *value[place + 1 :]]
    return source.choice(NASTY)


def bodies() -> list[tuple[str, bytes]]:
    source = random.Random(0)
    made = []
    for _ in range(NUM_BODIES):
        path = source.choice(
            [CHAT, CHAT, TEXT, TEXT, RESPONSES, RESPONSES, GENERATE, EMBED, TOKENIZE]
        )
        names = source.sample(list(GOOD[path]), source.randint(2, len(GOOD[path])))
        body: Any = {
            name: value
            for name, value in GOOD[path].items()
            if name in {"model", "messages", "prompt", "input", *names}
        }
        for _ in range(source.randint(0, 2)):
            body = spoil(body, source)
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        if isinstance(body, dict) and path not in (EMBED, TOKENIZE) and body.get(limit) in ENDLESS:
            body[limit] = 3
        made.append((path, json.dumps(body).encode()))
    return made


def _has_ended(path: str, events: str) -> bool:
    if path != RESPONSES:
        return events.endswith("data: [DONE]\n\n")
    return events.split("\n\n")[-2].startswith(
        ("event: response.completed\n", "event: response.incomplete\n")
    )


async def post_once(client: httpx.AsyncClient, url: str, body: bytes) -> httpx.Response:
    return await client.post(url, content=body, headers={"Content-Type": "application/json"})


async def send(url: str) -> Counter[int]:
    seen: Counter[int] = Counter()
    slots = asyncio.Semaphore(16)

    async def post(client: httpx.AsyncClient, path: str, body: bytes) -> None:
        async with slots:
            try:
                answer = await post_once(client, url + path, body)
                while answer.status_code == 429:  # others have all places
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                    answer = await post_once(client, url + path, body)
            except httpx.TimeoutException:
                raise AssertionError((path, body)) from None
        assert answer.status_code < 500, (path, body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], body
        elif b"event-stream" in answer.headers["content-type"].encode():
            assert _has_ended(path, answer.text), (body, answer.text[-300:])
        seen[answer.status_code] += 1

    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        await asyncio.gather(*(post(client, path, body) for path, body in bodies()))
    return seen


def test_spoilt_bodies(server: Program) -> None:
    seen = asyncio.run(send(server.url))
    assert seen.keys() <= {200, 400, 404}
    assert min(seen[200], seen[400]) > NUM_BODIES // 10
    assert server.is_healthy()
    wait_until(server.is_idle, "no request is open")
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL,
            prompt="the dog",
            temperature=0,
            max_tokens=24,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].text == text_after("the dog", 24)
