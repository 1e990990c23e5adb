"""Which requests get an equal cache salt: those of one key with an equal salt of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

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

KEYS = ("sk-one", "sk-two")
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: BODIES[CHAT],
    TEXT: BODIES[TEXT],
    RESPONSES: BODIES[RESPONSES],
    "/generate": {"prompt": "hi"},
    "/v1/embeddings": {"model": "m", "input": "hi"},
}
SALTED_ROUTES = [route for route in ROUTES if route != "/v1/embeddings"]


async def salt_of(app: App, route: str, key: str | None, **fields: Any) -> str | None:
    """The cache salt with which a request reaches the tokenizer."""
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    body = json.dumps({**ROUTES[route], **fields}).encode()
    call = app.call("POST", route, body, headers=headers)
    msg = await app.worker.receive()
    for reply in token_replies("ok")(msg):
        app.worker.send(reply)
    await call.done
    assert call.status == 200
    salt: str | None = msg.sampling.cache_salt
    return salt


@pytest.mark.parametrize("route", ROUTES)
def test_requests_of_two_keys_have_different_salts(route: str) -> None:
    async def scenario(app: App) -> None:
        first = await salt_of(app, route, "sk-one")
        again = await salt_of(app, route, "sk-one")
        other = await salt_of(app, route, "sk-two")
        assert first
        assert again == first
        assert other != first

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


@pytest.mark.parametrize("route", SALTED_ROUTES)
def test_a_salt_of_the_request_counts_beside_its_key(route: str) -> None:
    async def scenario(app: App) -> None:
        salts = [
            await salt_of(app, route, key, cache_salt=salt)
            for key in KEYS
            for salt in (None, "mine", "x" * 256)
        ]
        assert len(set(salts)) == 6
        assert await salt_of(app, route, "sk-one", cache_salt="mine") == salts[1]

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


def test_one_key_cannot_name_the_salt_of_another() -> None:
    async def scenario(app: App) -> None:
        salt = await salt_of(app, TEXT, "sk-one")
        assert await salt_of(app, TEXT, "sk-two", cache_salt=salt) != salt

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


def test_a_salt_differs_from_start_to_start() -> None:
    salts: list[str | None] = []

    async def scenario(app: App) -> None:
        salts.append(await salt_of(app, TEXT, "sk-one"))

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))
    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))
    assert salts[0] != salts[1]


@pytest.mark.parametrize(
    ("key", "options"),
    [
        (None, {}),
        ("sk-one", {"api_key": ("sk-one",)}),
        ("sk-one", {"api_key": ("sk-one", "sk-one")}),
        ("sk-one", {"api_key": KEYS, "share_prefixes_between_keys": True}),
    ],
    ids=["no key", "one key", "one key twice", "shared"],
)
def test_otherwise_a_request_keeps_its_salt(key: str | None, options: dict[str, Any]) -> None:
    async def scenario(app: App) -> None:
        assert await salt_of(app, TEXT, key) is None
        assert await salt_of(app, TEXT, key, cache_salt="mine") == "mine"

    run_with_app(scenario, config=replace(CONFIG, **options))


@pytest.mark.parametrize("salt", ["", "x" * 257])
def test_a_salt_outside_its_bounds_is_refused_before_it_is_combined(salt: str) -> None:
    async def scenario(app: App) -> None:
        headers = [(b"authorization", b"Bearer sk-one")]
        body = json.dumps({**BODIES[TEXT], "cache_salt": salt}).encode()
        call = app.call("POST", TEXT, body, headers=headers)
        await call.done
        assert_is_error(call, 400, param="cache_salt")

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))
