"""/v1/models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.server.harness import (
    MODEL,
    App,
    assert_is_error,
    run_with_app,
)


def card(name: str) -> dict[str, Any]:
    """What both OpenAI's and Anthropic's clients read of a model."""
    return {
        "id": name,
        "object": "model",
        "created": 1234,
        "owned_by": "minisgl",
        "max_model_len": 100,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:20:34Z",
        "lifecycle": "active",
        "max_input_tokens": 100,
        "max_tokens": 100,
    }


def test_models_lists_the_one_that_is_served() -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", "/v1/models")
        await call.done
        assert json.loads(call.body) == {
            "object": "list",
            "data": [card("m")],
            "has_more": False,
            "first_id": "m",
            "last_id": "m",
        }

    run_with_app(scenario)


@pytest.mark.parametrize("name", ["m", "some/model", "a/b/c", "name with spaces", "ü"])
def test_the_model_is_retrieved_by_its_name(name: str) -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", f"/v1/models/{name}")
        await call.done
        assert call.status == 200
        assert json.loads(call.body) == card(name)

    run_with_app(scenario, model=replace(MODEL, name=name))


@pytest.mark.parametrize("name", ["", "M", "m/", "m/m", "gpt-9"])
def test_retrieving_another_model_is_a_404(name: str) -> None:
    async def scenario(app: App) -> None:
        call = app.call("GET", f"/v1/models/{name}")
        await call.done
        error = assert_is_error(
            call, 404, type="invalid_request_error", param="model", code="model_not_found"
        )
        assert repr(name) in error["message"]

    run_with_app(scenario)
