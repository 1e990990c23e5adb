"""What a thread takes is what it was the first to touch, and others do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.utils.heap import (
    bytes_touched,
    bytes_touched_by,
    process_bytes_touched,
    return_free_memory,
    thread_ids,
)

MIB = 2**20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(),
    reason="huge pages are touched once for 512 pages",
)


def fill(size: int) -> None:
    assert len(bytearray(b"x" * size)) == size


def growth(of: Callable[[], int], act: Callable[[], None]) -> int:
    before = of()
    act()
    return of() - before


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_thread_that_fills_new_memory_has_touched_it() -> None:
    return_free_memory()
    assert growth(bytes_touched, lambda: fill(64 * MIB)) >= 64 * MIB


def test_what_another_thread_does_is_its_own_and_the_processs() -> None:
    def act() -> None:
        in_a_thread(lambda: fill(64 * MIB))

    assert growth(bytes_touched, act) < 8 * MIB
    assert growth(process_bytes_touched, act) >= 64 * MIB


def test_threads_are_known_by_their_ids() -> None:
    before = thread_ids()
    is_over = threading.Event()
    may_fill = threading.Event()
    has_filled = threading.Event()

    def act() -> None:
        may_fill.wait()
        fill(64 * MIB)
        has_filled.set()
        is_over.wait()

    thread = threading.Thread(target=act)
    thread.start()
    new = thread_ids() - before

    def let_it_fill() -> None:
        may_fill.set()
        has_filled.wait()

    assert len(new) == 1
    assert growth(lambda: bytes_touched_by(new), let_it_fill) >= 64 * MIB
    is_over.set()
    thread.join()
