"""A server of real processes, used through OpenAI's client; the oracle is transformers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.system.harness import (
    MAX_OPEN,
    MAX_RUNNING,
    MODEL,
    TIMEOUT_S,
    Program,
    endless_body,
    open_stream,
    wait_until,
)
from tests.system.oracle import CONTEXT, answer_to, text_after

pytestmark = pytest.mark.slow
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}
PROMPTS = ["the dog", "The quick brown fox", "語 é 👍", " and the end of", "x" * 60, "that was"]


def async_client(server: Program) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    )


def turn(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def ask(server: Program, prompt: str = "the dog") -> str:
    with server.client() as client:
        return client.completions.create(prompt=prompt, **GREEDY).choices[0].text


def test_a_text_completion_is_what_transformers_says(server: Program) -> None:
    for prompt in PROMPTS:
        assert ask(server, prompt) == text_after(prompt, 24)


def test_a_chat_completion_is_what_transformers_says(server: Program) -> None:
    with server.client() as client:
        for prompt in PROMPTS:
            answer = client.chat.completions.create(messages=turn(prompt), **GREEDY)
            assert answer.choices[0].message.content == answer_to(prompt, 24)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 24


def test_only_the_scheduler_has_torch(server: Program) -> None:
    with server.client() as client:
        client.chat.completions.create(messages=turn("the dog"), **GREEDY)
    workers = server.workers()
    assert has_torch(workers["scheduler-0"].pid)
    for name in ("detokenizer", "tokenizer-0"):
        assert not has_torch(workers[name].pid), name
    assert not has_torch(server.process.pid)
    assert "PyTorch" not in server.stderr


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_stream_is_the_whole_answer_in_pieces(server: Program) -> None:
    with server.client() as client:
        stream = client.chat.completions.create(
            messages=turn("the dog"), stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
    *texts, usage = chunks
    pieces = [chunk.choices[0].delta.content or "" for chunk in texts]
    assert "".join(pieces) == answer_to("the dog", 24)
    assert sum(map(bool, pieces)) > 5
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + [
        "length"
    ]
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 24


def test_several_prompts_give_several_choices_each_as_if_alone(server: Program) -> None:
    with server.client() as client:
        choices = client.completions.create(prompt=PROMPTS, **GREEDY).choices
    assert [choice.text for choice in choices] == [text_after(prompt, 24) for prompt in PROMPTS]


def test_equal_prompts_share_their_beginning(server: Program) -> None:
    prompt = "the fox jumps over the lazy dog " * 8
    with server.client() as client:
        first, second = (client.completions.create(prompt=prompt, **GREEDY) for _ in range(2))
    assert second.choices[0].text == first.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    num_cached = second.usage.prompt_tokens_details.cached_tokens
    assert num_cached is not None
    assert second.usage.prompt_tokens - 4 <= num_cached < second.usage.prompt_tokens


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(server: Program) -> None:
    def say(client: openai.OpenAI, seed: int) -> str:
        chosen = {**GREEDY, "temperature": 1, "seed": seed}
        return client.completions.create(prompt="the dog", **chosen).choices[0].text

    with server.client() as client:
        assert say(client, 1) == say(client, 1) != say(client, 2)


def test_thirty_two_at_once_answer_as_each_alone(server: Program) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 3 == 0:
            answer = await client.completions.create(prompt=prompt, **GREEDY)
            return answer.choices[0].text
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with async_client(server) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert asyncio.run(all_of_them()) == [
        text_after(PROMPTS[number % len(PROMPTS)], 24) for number in range(32)
    ]


def test_the_bytes_of_a_stream_are_events_and_nothing_else(server: Program) -> None:
    body = endless_body(max_tokens=40, stream=True, stream_options={"include_usage": True})
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = b"".join(response.iter_raw())
    *events, last = raw.split(b"\n\n")
    assert last == b""
    assert events[-1] == b"data: [DONE]"
    assert all(re.fullmatch(rb"data: \{[^\r\n]*", event) for event in events[:-1])
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == text_after(
        "the dog", 40
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 40


def assert_nothing_is_open(server: Program) -> None:
    wait_until(server.is_idle, "no request is open")
    assert ask(server) == text_after("the dog", 24)
    assert server.is_healthy()


def test_clients_that_hang_up_in_mid_stream_leave_nothing_behind(server: Program) -> None:
    for _ in range(3 * MAX_RUNNING):
        with open_stream(server) as events:
            next(events)
    assert_nothing_is_open(server)


def test_clients_that_hang_up_before_the_first_token_leave_nothing_behind(server: Program) -> None:
    def give_up(stream: bool) -> None:
        body = endless_body(stream=stream)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions",
                json=body,
                timeout=httpx.Timeout(TIMEOUT_S, read=0.2),
            )

    with open_stream(server), open_stream(server), open_stream(server):  # all rows are taken
        for stream in (False, True):
            give_up(stream)
    assert_nothing_is_open(server)


def test_a_client_that_hangs_up_on_a_whole_answer_leaves_nothing_behind(server: Program) -> None:
    for _ in range(6):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions",
                json=endless_body(),
                timeout=httpx.Timeout(TIMEOUT_S, read=0.1),
            )
    assert_nothing_is_open(server)


def test_more_requests_than_places_are_refused_and_the_open_ones_finish(server: Program) -> None:
    async def one(client: AsyncOpenAI) -> str | None:
        try:
            return (await client.completions.create(prompt="the dog", **GREEDY)).choices[0].text
        except openai.RateLimitError as error:
            assert error.code == "queue_full"
            return None

    async def all_of_them() -> list[str | None]:
        async with async_client(server) as client:
            return await asyncio.gather(*(one(client) for _ in range(MAX_OPEN + 20)))

    answers = asyncio.run(all_of_them())
    assert set(answers) <= {text_after("the dog", 24), None}
    assert sum(answer is not None for answer in answers) >= MAX_OPEN
    assert_nothing_is_open(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-40, "top_p": 0.9},
        {"temperature": 100},
        {"temperature": 1, "top_p": 1e-50},
        {"temperature": 1, "min_p": 1},
        {"temperature": 1, "min_p": 1e-300},
        {"temperature": 1, "top_k": 2**31},
        {"temperature": 1, "top_k": 2**63},
        {"temperature": 1, "seed": 2**63 - 1},
        {"temperature": 1, "seed": -(2**63)},
        {"max_tokens": 1},
        {"prompt": "\1"},
        {"prompt": "<s></s><|im_end|>"},
        {"prompt": [0]},
        {"prompt": [300] * 50},
        {"prompt": "x" * 9_000},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_extreme_values_are_answered_or_refused_and_the_engine_lives(
    server: Program, fields: dict[str, Any]
) -> None:
    body = endless_body(**{"max_tokens": 4, **fields})
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code in (200, 400), response.text
    assert ask(server) == text_after("the dog", 24)


def test_a_prompt_that_fills_the_context_is_answered_and_one_more_token_is_too_long(
    server: Program,
) -> None:
    def post(num_prompt: int) -> httpx.Response:
        body = endless_body(prompt=[5] * num_prompt, max_tokens=4)
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)

    too_long = post(CONTEXT - 3)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT) in too_long.json()["error"]["message"]
    assert post(600).json()["usage"]["prompt_tokens"] == 600


def test_the_model_is_listed_by_its_name(server: Program) -> None:
    with server.client() as client:
        (model,) = client.models.list().data
    assert model.id == MODEL
    assert getattr(model, "max_model_len") == CONTEXT  # noqa: B009 - the client has no such field


def test_the_model_is_retrieved_and_another_is_not_found(server: Program) -> None:
    with server.client() as client:
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as refusal:
            client.models.retrieve("some/other")
    assert refusal.value.code == "model_not_found"


def test_a_prompt_is_tokenized_as_for_a_completion_and_comes_back(server: Program) -> None:
    def post(route: str, **body: Any) -> Any:
        response = httpx.post(f"{server.url}{route}", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        return response.json()

    for given in ({"prompt": "the dog, 語 é 👍"}, {"messages": turn("the dog")}):
        encoded = post("/tokenize", **given)
        assert (encoded["count"], encoded["max_model_len"]) == (len(encoded["tokens"]), CONTEXT)
        route = "/v1/completions" if "prompt" in given else "/v1/chat/completions"
        usage = post(route, model=MODEL, max_tokens=1, **given)["usage"]
        assert usage["prompt_tokens"] == encoded["count"]
    text = post("/tokenize", prompt="the dog, 語 é 👍", add_special_tokens=False)["tokens"]
    assert post("/detokenize", tokens=text)["prompt"] == "the dog, 語 é 👍"
    refusal = httpx.post(f"{server.url}/detokenize", json={"tokens": [1, 10**6]}, timeout=TIMEOUT_S)
    assert refusal.status_code == 400
    assert re.search(r"1000000 is outside \[0, \d+\)", refusal.json()["error"]["message"])
    assert_nothing_is_open(server)
