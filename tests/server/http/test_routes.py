"""Routes: health, version, sampling parameters, clients that go away."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.message import (
    AbortMsg,
    UserReply,
)
from minisgl.version import __version__
from tests.server.harness import (
    CHAT,
    TEXT,
    App,
    all_routes,
    assert_is_error,
    run_with_app,
    token_replies,
    wait_until,
)


@all_routes
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_goes_away_aborts_its_request(
    route: str, stream: bool, started: bool
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, stream=stream)
        uid = (await app.worker.receive()).uid
        witness = app.post(TEXT, stream=True)
        witness_uid = (await app.worker.receive()).uid
        if started:
            app.worker.send(UserReply(uid, "part"), UserReply(witness_uid, "seen"))
            await wait_until(
                lambda: b"seen" in witness.body
            )  # and so has "part" been, whether it is shown or not
        call.disconnect()
        assert await app.worker.receive() == AbortMsg(uid)
        await call.done
        app.worker.send(UserReply(witness_uid, finish="stop"))
        await witness.done
        app.worker.answer_with(token_replies("next"))
        again = app.post(route)
        await again.done
        assert again.status == 200

    run_with_app(scenario)


def test_health_is_200_until_the_engine_fails() -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", "/health")
        await call.done
        assert (call.status, json.loads(call.body)) == (200, {"status": "ok"})
        app.frontend.fail("the engine is gone")
        call = app.call("GET", "/health")
        await call.done
        assert_is_error(call, 503, message="the engine is gone", type="server_error")

    run_with_app(scenario)


def test_head_has_the_status_of_get() -> None:
    async def scenario(app: App) -> None:
        for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/models/other", 404)):
            call = app.call("HEAD", path)
            await call.done
            assert call.status == status
        app.frontend.fail("the engine is gone")
        call = app.call("HEAD", "/health")
        await call.done
        assert call.status == 503

    run_with_app(scenario)


def test_the_version_is_the_packages() -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", "/version")
        await call.done
        assert (call.status, json.loads(call.body)) == (200, {"version": __version__})

    run_with_app(scenario)


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, SamplingParams(temperature=0.25)),
        (
            {"temperature": 0, "top_p": 0.5, "max_tokens": 5, "max_completion_tokens": 9},
            SamplingParams(temperature=0.0, top_p=0.5, max_tokens=9),
        ),
    ],
)
def test_sampling_comes_from_the_request_and_then_from_the_model(
    fields: dict[str, Any], sampling: SamplingParams
) -> None:
    async def scenario(app: App) -> None:
        call = app.post(CHAT, **fields)
        msg = await app.worker.receive()
        assert msg.sampling == sampling
        app.worker.send(UserReply(msg.uid, finish="stop"))
        await call.done

    run_with_app(scenario)
