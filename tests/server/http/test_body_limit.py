"""The limit on bodies."""

from __future__ import annotations

import json

import pytest

from tests.server.harness import (
    BODIES,
    MAX_BODY,
    TEXT,
    App,
    all_routes,
    assert_is_error,
    run_with_app,
    token_replies,
)


@all_routes
@pytest.mark.parametrize("parts", [1, 7])
def test_a_body_over_the_limit_is_a_413_however_it_comes(route: str, parts: int) -> None:
    async def scenario(app: App) -> None:
        call = app.post(route, raw=b" " * (MAX_BODY + 1), parts=parts)
        await call.done
        error = assert_is_error(call, 413, type="invalid_request_error")
        assert str(MAX_BODY) in error["message"]

    run_with_app(scenario)


def test_a_body_of_exactly_the_limit_is_read() -> None:
    async def scenario(app: App) -> None:
        app.worker.answer_with(token_replies("ok"))
        call = app.post(TEXT, raw=json.dumps(BODIES[TEXT]).encode().ljust(MAX_BODY), parts=3)
        await call.done
        assert call.status == 200

    run_with_app(scenario)
