"""Fixtures that all tests share: tiny checkpoints on disk, each written once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From one of tests.checkpoints.ARCHITECTURES to the folder of its tiny checkpoint; not to be written to."""
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda arch: tiny_checkpoint(arch, root / arch))
