"""Fixtures that all tests share: tiny checkpoints on disk, each written once a session."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported: waiting threads that spin make tiny models slow on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# To share the products of a tiny model between threads takes longer than to compute them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # no GPU: its kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Else an example fails that takes more than 0.2 s, as on a machine with much else to do.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From one of tests.checkpoints.ARCHITECTURES to the folder of its tiny checkpoint."""
    # Here, because the process that only distributes tests needs no transformers.
    from tests.checkpoints import tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda arch: tiny_checkpoint(arch, root / arch))


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while modules are imported: nearly all that they make stays."""
    # A shell lets programs in its background ignore Ctrl-C. Some tests send it to what they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    only_distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not only_distributes:
        gc.disable()


def pytest_collection_finish() -> None:
    """Exempt it from the collections of tests, each of which would walk it for 0.2 s."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run whole processes first: a long file that began last would leave the other cores idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
