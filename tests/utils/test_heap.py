"""What a thread takes is what it was the first to touch, and others do not count."""

from __future__ import annotations

import multiprocessing
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


def check_one_thread() -> None:
    return_free_memory()
    assert growth(bytes_touched, lambda: fill(64 * MIB)) >= 64 * MIB


def check_another_thread() -> None:
    def act() -> None:
        in_a_thread(lambda: fill(64 * MIB))

    assert growth(bytes_touched, act) < 8 * MIB
    assert growth(process_bytes_touched, act) >= 64 * MIB


def check_thread_ids() -> None:
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


@pytest.mark.parametrize("check", [check_one_thread, check_another_thread, check_thread_ids])
def test_memory_is_counted_where_it_is_touched_first(check: Callable[[], None]) -> None:
    """In a process of its own: one of tests has huge pages, and memory that it has touched."""
    process = multiprocessing.get_context("spawn").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0
