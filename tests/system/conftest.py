"""One server of a tiny model for all tests that only talk to it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.system.harness import Program, small_server
from tests.system.oracle import ARCH, CONTEXT


@pytest.fixture(scope="session", autouse=True)
def programs_are_interruptible() -> None:
    """A shell's job in the background ignores SIGINT, and so would the programs it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a long context."""
    return tiny_checkpoint(
        ARCH, tmp_path_factory.mktemp("system") / ARCH, max_position_embeddings=CONTEXT
    )


@pytest.fixture(scope="session")
def running_server(folder: Path) -> Iterator[Callable[[], Program]]:
    """A function that returns the server, and starts another one if a test has broken it."""
    with ExitStack() as programs:
        started: list[Program] = []

        def get() -> Program:
            if not started or not started[-1].is_healthy():
                program = Program(*small_server(folder, "--overlap"))
                started.append(programs.enter_context(program).wait_ready())
            return started[-1]

        yield get


@pytest.fixture
def server(running_server: Callable[[], Program]) -> Program:
    """A server of MAX_RUNNING rows; the tests of a worker share it, and each leaves it idle."""
    return running_server()
