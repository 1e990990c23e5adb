"""Engines and oracles, each made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoints import tiny_model
from tests.engine.harness import WatchedEngine, config_of
from tests.engine.oracle import Oracle


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Oracle]:
    """From an architecture to transformers' model of its tiny checkpoint."""
    return cache(lambda arch: Oracle(tiny_model(arch)))


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> Callable[..., WatchedEngine]:
    """From an architecture and a page size to an engine.

    Its pool holds what the test before left there.
    """

    @cache
    def make(arch: str, page_size: int = 4) -> WatchedEngine:
        config = config_of(checkpoint(arch), page_size=page_size, num_pages=2048 // page_size)
        return WatchedEngine(config)

    return make
