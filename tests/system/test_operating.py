"""A server as it is operated: with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.system.harness import MODEL, Program, small
from tests.system.oracle import answer_to

pytestmark = pytest.mark.slow
KEY, OTHER_KEY = "sk-of-the-environment", "sk-of-the-arguments"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Program]:
    """A server with keys that logs all there is to log."""
    argv = small(folder, "--api-key", OTHER_KEY, "--log-level", "DEBUG")
    with Program(*argv, env={"MINISGL_API_KEY": KEY}) as program:
        yield program.wait_ready()


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_openais_client_is_served_with_a_key(key: str, guarded: Program) -> None:
    with guarded.client(key) as client:
        assert client.models.retrieve(MODEL).id == MODEL
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "the dog"}],
            temperature=0,
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].message.content == answer_to("the dog", 8)


def test_openais_client_is_refused_without_one_and_no_key_is_ever_written(guarded: Program) -> None:
    with guarded.client("sk-guessed") as client, pytest.raises(openai.AuthenticationError) as refusal:
        client.models.list()
    assert refusal.value.code == "invalid_api_key"
    assert httpx.get(f"{guarded.url}/health").status_code == 200
    assert "sk-" not in guarded.stderr
