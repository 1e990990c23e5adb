"""`cache_salt` of each generating endpoint: only requests with an equal salt share a prefix."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.system.harness import MODEL, TIMEOUT_S, Program

pytestmark = pytest.mark.slow
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
CHAT: list[dict[str, str]] = [{"role": "user", "content": PROMPT}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 1},
    "/generate": {"prompt": PROMPT, "max_tokens": 1},
}


def num_cached_tokens(server: Program, route: str, salt: str | None) -> int:
    body = {"model": MODEL, "temperature": 0, "cache_salt": salt, **REQUESTS[route]}
    response = httpx.post(f"{server.url}{route}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    num_cached: int = details["cached_tokens"]
    return num_cached


@pytest.mark.parametrize("route", REQUESTS)
def test_a_prefix_is_cached_for_its_salt_only(server: Program, route: str) -> None:
    mine = f"mine {route}"
    assert num_cached_tokens(server, route, mine) == 0
    assert num_cached_tokens(server, route, mine) > 0
    assert num_cached_tokens(server, route, f"other {route}") == 0


def test_without_a_salt_no_salted_prefix_is_found(server: Program) -> None:
    text = "Sphinx of black quartz, judge my vow. " * 8  # no other test has computed it
    body = {"prompt": text, "max_tokens": 1}
    cached = []
    for salt in ("first", None, None, "second"):
        response = httpx.post(
            f"{server.url}/generate", json={**body, "cache_salt": salt}, timeout=TIMEOUT_S
        )
        cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[1] == cached[3] == 0
    assert cached[2] > 0


@pytest.mark.parametrize("route", REQUESTS)
@pytest.mark.parametrize("salt", ["", "x" * 257])
def test_a_salt_outside_its_bounds_is_refused_by_name(
    server: Program, route: str, salt: str
) -> None:
    body = {"model": MODEL, "cache_salt": salt, **REQUESTS[route]}
    response = httpx.post(f"{server.url}{route}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"
