"""What a stranger can send to the program, and what its neighbours see of it."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.system.harness import MODEL, TIMEOUT_S, Program, small_server, wait_until

pytestmark = pytest.mark.slow
NUM_DESCRIPTORS = 256
NUM_SILENT = 300


def _limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Program]:
    """A server with few descriptors."""
    with Program(*small_server(folder), preexec_fn=_limit_descriptors) as program:
        yield program.wait_ready()


def assert_is_healthy(program: Program) -> None:
    response = httpx.get(f"{program.url}/health", timeout=1)
    assert response.status_code == 200


def test_silent_connections_take_neither_health_nor_the_disk(narrow: Program) -> None:
    num_logged = len(narrow.stderr)
    with ExitStack() as silent:
        for _ in range(NUM_SILENT):
            silent.enter_context(socket.create_connection(("127.0.0.1", narrow.port), TIMEOUT_S))
        for _ in range(10):
            assert_is_healthy(narrow)
        refused = httpx.get(f"{narrow.url}/v1/models", timeout=TIMEOUT_S)
        assert refused.status_code == 503
    assert len(narrow.stderr) - num_logged < 4096
    wait_until(lambda: _is_served(narrow), "others are served again")


def test_connections_that_come_and_go_leave_nothing(narrow: Program) -> None:
    num_logged = len(narrow.stderr)
    for _ in range(20):
        with ExitStack() as dropped:
            for _ in range(100):
                dropped.enter_context(
                    socket.create_connection(("127.0.0.1", narrow.port), TIMEOUT_S)
                )
        assert_is_healthy(narrow)
    assert len(narrow.stderr) - num_logged < 4096
    wait_until(lambda: _is_served(narrow), "others are served again")


def _is_served(program: Program) -> bool:
    body = {"model": MODEL, "prompt": "the dog", "max_tokens": 1}
    response = httpx.post(f"{program.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    return response.status_code == 200
