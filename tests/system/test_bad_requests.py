"""The answer to a bad request is a 4xx with OpenAI's error object, and the server is as before."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.system.harness import MODEL, Program, wait_until

pytestmark = pytest.mark.slow
SOON_S = 20.0
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TURN = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [TURN], "max_tokens": 2, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2, **fields}).encode()


BAD: dict[str, tuple[str, str, bytes]] = {
    "empty body": ("POST", CHAT, b""),
    "no JSON": ("POST", CHAT, b"{'model': 'tiny'}"),
    "JSON that ends early": ("POST", CHAT, chat()[:-5]),
    "JSON of another kind": ("POST", CHAT, b"[1, 2]"),
    "null": ("POST", CHAT, b"null"),
    "no bytes of UTF-8": ("POST", CHAT, b'{"model": "\xff\xfe"}'),
    "UTF-16 without a mark": ("POST", CHAT, b"\x00\xd8" * 50),
    "deep nesting": ("POST", CHAT, b"[" * 200_000),
    "deep nesting in a field": (
        "POST",
        CHAT,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ),
    "nesting as deep as it is read": (
        "POST",
        CHAT,
        chat(stop="X").replace(b'"X"', b"[" * 900 + b"]" * 900),
    ),
    "an integer of 5000 digits": (
        "POST",
        CHAT,
        chat(seed=0).replace(b'"seed": 0', b'"seed": ' + b"9" * 5000),
    ),
    "half a surrogate pair": ("POST", CHAT, chat(messages=[{"role": "user", "content": "\ud83d"}])),
    "half a surrogate pair in a text": ("POST", TEXT, text(prompt="a\udc00")),
    "half a surrogate pair as the model": ("POST", CHAT, chat(model="\ud83d")),
    "a null byte in a message": ("POST", CHAT, chat(messages=[{"role": "user", "content": "a\0"}])),
    "a null byte as a prompt": ("POST", TEXT, text(prompt="\0")),
    "a null byte to stop at": ("POST", TEXT, text(stop="\0")),
    "options of a stream without one": ("POST", CHAT, chat(stream_options={"include_usage": True})),
    "wrong model": ("POST", CHAT, chat(model="gpt-9")),
    "no model": ("POST", CHAT, b'{"messages": []}'),
    "model of a wrong type": ("POST", CHAT, chat(model=["tiny"])),
    "model with null bytes": ("POST", CHAT, chat(model="tiny\0")),
    "no messages": ("POST", CHAT, b'{"model": "tiny"}'),
    "empty messages": ("POST", CHAT, chat(messages=[])),
    "messages of a wrong type": ("POST", CHAT, chat(messages="hi")),
    "bad role": ("POST", CHAT, chat(messages=[{"role": "robot", "content": "hi"}])),
    "content of a wrong type": ("POST", CHAT, chat(messages=[{"role": "user", "content": 7}])),
    "an image": (
        "POST",
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    ),
    "empty prompt": ("POST", TEXT, text(prompt="")),
    "no prompts": ("POST", TEXT, text(prompt=[])),
    "an empty prompt among others": ("POST", TEXT, text(prompt=["a", ""])),
    "texts and ids mixed": ("POST", TEXT, text(prompt=["a", 1])),
    "a token id outside the vocabulary": ("POST", TEXT, text(prompt=[301])),
    "a negative token id": ("POST", TEXT, text(prompt=[-1])),
    "a token id beyond 32 bits": ("POST", TEXT, text(prompt=[2**40])),
    "a bad id in the second prompt": ("POST", TEXT, text(prompt=[[5], [100_000]])),
    "a prompt that is too long": ("POST", TEXT, text(prompt="dog " * 40_000)),
    "ids that are too many": ("POST", TEXT, text(prompt=[5] * 16_400)),
    "a chat that is too long": ("POST", CHAT, chat(messages=[TURN] * 4_000)),
    "prompt and answer that are too long": ("POST", TEXT, text(max_tokens=16_384)),
    "max_tokens of zero": ("POST", CHAT, chat(max_tokens=0)),
    "negative max_tokens": ("POST", CHAT, chat(max_tokens=-1)),
    "huge max_tokens": ("POST", CHAT, chat(max_tokens=10**30)),
    "max_tokens of a fraction": ("POST", CHAT, chat(max_tokens=1.5)),
    "huge max_completion_tokens": ("POST", CHAT, chat(max_completion_tokens=2**64)),
    "NaN": ("POST", CHAT, chat(temperature=float("nan"))),
    "Infinity": ("POST", CHAT, chat(top_p=float("inf"))),
    "negative temperature": ("POST", CHAT, chat(temperature=-1)),
    "temperature in words": ("POST", CHAT, chat(temperature="hot")),
    "temperature of 400 digits": ("POST", CHAT, chat(temperature=10**400)),
    "top_p of zero": ("POST", CHAT, chat(top_p=0)),
    "top_k below -1": ("POST", CHAT, chat(top_k=-7)),
    "huge top_k": ("POST", CHAT, chat(top_k=10**30)),
    "huge seed": ("POST", CHAT, chat(seed=2**64)),
    "no choice": ("POST", CHAT, chat(n=0)),
    "more choices than there may be": ("POST", CHAT, chat(n=129)),
    "an empty stop": ("POST", CHAT, chat(stop=[""])),
    "a token to stop at that there is not": (
        "POST",
        CHAT,
        chat(min_tokens=1, stop_token_ids=[2_000_000_000]),
    ),
    "tools": ("POST", CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}])),
    "a field of another server": ("POST", CHAT, chat(use_beam_search=True)),
    "stream in words": ("POST", CHAT, chat(stream="yes")),
    "a refused stream": ("POST", TEXT, text(stream=True, prompt=[301])),
    "a body over the limit": ("POST", CHAT, chat(user="x" * (1 << 20))),
    "wrong route": ("POST", "/v1/embedding", chat()),
    "wrong method": ("GET", CHAT, b""),
    "another wrong method": ("DELETE", "/v1/models", b""),
    "a path of null bytes": ("GET", "/v1/%00%ff", b""),
}


def assert_is_openais_error(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)


def assert_is_as_before(server: Program) -> None:
    assert server.is_healthy()
    assert server.is_idle()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_and_changes_nothing(server: Program, name: str) -> None:
    method, path, body = BAD[name]
    headers = {"content-type": "application/json"}
    assert_is_openais_error(
        httpx.request(method, server.url + path, content=body, headers=headers, timeout=SOON_S)
    )
    assert_is_as_before(server)


def test_unknown_fields_are_ignored_and_logged_once(server: Program) -> None:
    headers = {"content-type": "application/json"}
    for value in (True, "x" * 500_000):  # read by the server itself, and by another process
        body = chat(frobnicate=value, max_tokens=1, **{"\ud83d": 1})
        answer = httpx.post(server.url + CHAT, content=body, headers=headers, timeout=SOON_S)
        assert answer.status_code == 200, answer.text
    wait_until(lambda: r"'\ud83d' of ChatRequest" in server.stderr, "the last name is logged")
    assert server.stderr.count("'frobnicate' of ChatRequest is ignored") == 1
    assert_is_as_before(server)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", ""]
)
def test_a_body_of_another_type_is_refused(server: Program, kind: str) -> None:
    assert_is_openais_error(
        httpx.post(
            server.url + CHAT, content=chat(), headers={"content-type": kind}, timeout=SOON_S
        )
    )
    assert_is_as_before(server)


def test_a_body_over_the_limit_is_refused_though_its_length_is_not_said(server: Program) -> None:
    parts = (b" " * 4096 for _ in range(300))
    response = httpx.post(server.url + CHAT, content=parts, timeout=SOON_S)
    assert response.status_code == 413
    assert_is_openais_error(response)
    assert_is_as_before(server)
