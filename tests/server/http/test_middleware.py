"""Middleware: which keys and origins are allowed, and what the others get."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.server.harness import (
    BODIES,
    CHAT,
    CONFIG,
    MAX_BODY,
    App,
    HttpCall,
    assert_is_error,
    run_with_app,
    token_replies,
)

KEYS = ("sk-one", "ключ")


def bearer(key: str) -> dict[str, list[tuple[bytes, bytes]]]:
    return {"headers": [(b"authorization", b"Bearer " + key.encode())]}


def assert_is_refused(call: HttpCall) -> None:
    error = assert_is_error(call, 401, type="invalid_request_error", code="invalid_api_key")
    assert call.headers["www-authenticate"] == "Bearer"
    assert not any(key in error["message"] for key in KEYS)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER "])
def test_each_of_the_keys_opens_the_door(key: str, scheme: bytes) -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("ok"))
        headers = [(b"authorization", scheme + key.encode())]
        call = app.call("POST", CHAT, json.dumps(BODIES[CHAT]).encode(), headers=headers)
        await call.done
        assert call.status == 200

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-on",
        b"Bearer sk-one2",
        b"Bearer SK-ONE",
        b"Bearer sk-one,sk-two",
        b"Bearer  sk-one",
        b"Bearer sk-one ",
        b"Bearer sk-one\xa0",
        b"Bearer \xa0sk-one",
        b"Bearer\tsk-one",
        b"Basic sk-one",
        b"sk-one",
        b"Bearer \xff\xfe",
        b"\xe9 sk-one",
        b"Bearer " + b"x" * 100_000,
    ],
    ids=lambda value: str(value)[:20],
)
def test_without_a_known_key_nothing_is_answered(value: bytes | None) -> None:
    async def scenario(app: App) -> None:
        headers = [] if value is None else [(b"authorization", value)]
        call = app.call("POST", CHAT, json.dumps(BODIES[CHAT]).encode(), headers=headers)
        await call.done
        assert_is_refused(call)
        assert app.frontend.num_open == 0

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


@pytest.mark.parametrize("values", [("sk-one", "sk-one"), ("sk-one", "no"), ("no", "sk-one")])
def test_of_two_keys_none_counts(values: tuple[str, str]) -> None:
    async def scenario(app: App) -> None:
        headers = [(b"authorization", f"Bearer {value}".encode()) for value in values]
        call = app.call("GET", "/v1/models", headers=headers)
        await call.done
        assert_is_refused(call)

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


@pytest.mark.parametrize(
    ("in_x_api_key", "in_authorization", "status"),
    [
        (["sk-one"], ["Bearer sk-one"], 200),
        (["sk-one"], [], 200),
        (["sk-one"], ["Bearer no"], 401),
        (["no"], ["Bearer sk-one"], 401),
        (["sk-one"], ["Bearer ключ"], 401),
        (["sk-one"], ["Basic sk-one"], 401),
        (["sk-one", "sk-one"], [], 401),
        (["sk-one"], ["Bearer sk-one", "Bearer sk-one"], 401),
    ],
)
def test_a_key_may_come_in_both_headers(
    in_x_api_key: list[str], in_authorization: list[str], status: int
) -> None:
    async def scenario(app: App) -> None:
        headers = [(b"x-api-key", key.encode()) for key in in_x_api_key]
        headers += [(b"authorization", value.encode()) for value in in_authorization]
        call = app.call("GET", "/v1/models", headers=headers)
        await call.done
        assert call.status == status

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


@pytest.mark.parametrize(
    ("path", "header"),
    [("/v1/messages", "X-Api-Key: KEY"), (CHAT, "Authorization: Bearer KEY")],
)
def test_who_has_no_key_reads_which_header_it_belongs_to(path: str, header: str) -> None:
    async def scenario(app: App) -> None:
        call = app.call("POST", path)
        await call.done
        assert call.status == 401
        message = json.loads(call.body)["error"]["message"]
        assert message == f"this server wants an API key that it knows: {header}"

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/m"),
        ("GET", "/version"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing/here"),
        ("OPTIONS", CHAT),
        ("GET", "/health/"),
        ("GET", "//health"),
    ],
)
def test_every_route_but_health_wants_a_key(method: str, path: str) -> None:
    async def scenario(app: App) -> None:
        call = app.call(method, path)
        await call.done
        assert_is_refused(call)
        health = app.call("GET", "/health")
        await health.done
        assert health.status == 200

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


def test_a_body_is_not_read_before_the_key() -> None:
    async def scenario(app: App) -> None:
        call = app.post(CHAT, raw=b" " * (MAX_BODY + 1), parts=7)
        await call.done
        assert_is_refused(call)
        assert call.num_received == 0

    run_with_app(scenario, config=replace(CONFIG, api_key=KEYS))


def test_without_keys_none_is_asked_for_and_one_that_comes_is_no_harm() -> None:
    async def scenario(app: App) -> None:
        for options in ({}, bearer("anything")):
            call = app.call("GET", "/v1/models", **options)
            await call.done
            assert call.status == 200

    run_with_app(scenario)


ORIGIN = "https://a.org"


def from_page(origin: str, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [(b"origin", origin.encode()), *more]


@pytest.mark.parametrize("keys", [(), KEYS])
def test_a_browser_asks_without_a_key_whether_it_may_send_one(keys: tuple[str, ...]) -> None:
    async def scenario(app: App) -> None:
        asks = [
            (b"access-control-request-method", b"POST"),
            (b"access-control-request-headers", b"authorization,content-type"),
        ]
        call = app.call("OPTIONS", CHAT, headers=from_page(ORIGIN, *asks))
        await call.done
        assert call.status == 200
        assert call.headers["access-control-allow-origin"] == ORIGIN
        assert set(call.headers["access-control-allow-methods"].split(", ")) == {
            "GET",
            "POST",
            "DELETE",
        }
        assert "authorization" in call.headers["access-control-allow-headers"].lower()

        app.worker.answer_with(token_replies("ok"))
        for path, options in (
            (CHAT, from_page(ORIGIN)),
            (CHAT, from_page(ORIGIN, *bearer(KEYS[0])["headers"])),
        ):
            call = app.call("POST", path, json.dumps(BODIES[CHAT]).encode(), headers=options)
            await call.done
            assert call.headers["access-control-allow-origin"] == ORIGIN, (
                "a page may read the error too"
            )
            assert call.status == (401 if keys and options == from_page(ORIGIN) else 200)

    run_with_app(
        scenario, config=replace(CONFIG, api_key=keys, cors_origins=("https://b.org", ORIGIN))
    )


@pytest.mark.parametrize(("origin", "status"), [(ORIGIN, 200), ("https://b.org", 400)])
def test_a_page_of_an_allowed_origin_may_reach_a_private_network(origin: str, status: int) -> None:
    async def scenario(app: App) -> None:
        asks = [
            (b"access-control-request-method", b"POST"),
            (b"access-control-request-private-network", b"true"),
        ]
        call = app.call("OPTIONS", CHAT, headers=from_page(origin, *asks))
        await call.done
        assert call.status == status
        if status == 200:
            assert call.headers["access-control-allow-private-network"] == "true"

    run_with_app(scenario, config=replace(CONFIG, cors_origins=(ORIGIN,)))


@pytest.mark.parametrize(
    ("allowed", "origin", "allow_origin"),
    [(("*",), ORIGIN, "*"), ((ORIGIN,), "https://b.org", None)],
)
def test_all_origins_or_those_given(
    allowed: tuple[str, ...], origin: str, allow_origin: str | None
) -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", "/v1/models", headers=from_page(origin))
        await call.done
        assert call.headers.get("access-control-allow-origin") == allow_origin
        if allow_origin is not None:
            exposed = set(call.headers["access-control-expose-headers"].split(", "))
            assert exposed == {"Retry-After", "X-Request-Id", "Request-Id"}

    run_with_app(scenario, config=replace(CONFIG, cors_origins=allowed))


def test_without_the_option_no_page_is_let_in() -> None:
    async def scenario(app: App) -> None:
        preflight = app.call(
            "OPTIONS", CHAT, headers=from_page(ORIGIN, (b"access-control-request-method", b"POST"))
        )
        plain = app.call("GET", "/v1/models", headers=from_page(ORIGIN))
        await preflight.done
        await plain.done
        assert preflight.status == 405
        assert not any(
            name.startswith("access-control") for name in preflight.headers | plain.headers
        )

    run_with_app(scenario)
