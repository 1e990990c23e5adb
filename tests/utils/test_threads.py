"""Executors whose threads run before anything is submitted."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from minisgl.errors import EngineFailed
from minisgl.utils.threads import (
    check_threads_are_left,
    lack_of_threads_is_explained,
    started_executor,
)

DEEP = 2**24


def no_thread(*_: object) -> NoReturn:
    """What Python does if the system has no thread left: in place of `Thread.start`."""
    raise RuntimeError("can't start new thread")


def test_an_executor_needs_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started_executor("test", 3)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    both_run = threading.Barrier(3)
    waits = [executor.submit(both_run.wait, 60) for _ in range(3)]
    assert sorted(wait.result() for wait in waits) == [0, 1, 2]
    executor.shutdown()


def test_its_threads_have_the_stack_that_is_asked_for_and_later_ones_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    sizes: list[int] = []

    def start_and_note(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        threading.stack_size(sizes[-1])  # to ask for it has set the default
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_and_note)
    default_bytes = threading.stack_size()
    executor = started_executor("test", 2, DEEP)
    assert sizes == [DEEP, DEEP]
    assert threading.stack_size() == default_bytes
    executor.shutdown()


def test_executors_that_are_made_side_by_side_leave_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size is the process's: one must not take another's for the default."""
    start = threading.Thread.start
    second_starts = threading.Event()
    first_is_made = threading.Event()
    other = threading.Thread(target=lambda: started_executor("second", 1, 2 * DEEP).shutdown())

    def start_in_turns(thread: threading.Thread) -> None:
        if thread.name.startswith("first"):
            start(other)
            second_starts.wait(0.2)  # it should not, so this passes
        elif thread.name.startswith("second"):
            second_starts.set()
            first_is_made.wait(60)
        start(thread)

    default_bytes = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", start_in_turns)
    started_executor("first", 1, DEEP).shutdown()
    first_is_made.set()
    other.join()
    assert threading.stack_size() == default_bytes


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_if_there_is_no_thread_left_nothing_waits_for_it(
    num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_some(thread: threading.Thread) -> None:
        if len(started) == num_before:
            no_thread()
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    default_bytes = threading.stack_size()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_executor("test", 3, DEEP)
    assert threading.stack_size() == default_bytes
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_a_lack_of_threads_says_where_to_look_and_other_errors_stay_as_they_are() -> None:
    with pytest.raises(EngineFailed, match="ulimit -u"), lack_of_threads_is_explained():
        no_thread()
    with pytest.raises(RuntimeError, match=r"^another$"), lack_of_threads_is_explained():
        raise RuntimeError("another")


class PanicException(BaseException):
    """As pyo3 makes one of a panic in Rust: no `Exception`, and of no module that has it."""


def test_a_lack_of_threads_in_rust_is_explained_and_another_panic_stays_as_it_is() -> None:
    """The words are those of the tokenizers library when its threads cannot start."""
    words = (
        "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: "
        'IOError(Os { code: 11, kind: WouldBlock, message: "Resource temporarily unavailable" }) }'
    )
    with pytest.raises(EngineFailed, match="ulimit -u"), lack_of_threads_is_explained():
        raise PanicException(words)
    with pytest.raises(PanicException, match=r"^another$"), lack_of_threads_is_explained():
        raise PanicException("another")


def test_threads_that_are_left_are_found_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    check_threads_are_left(3)
    assert threading.active_count() == before
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        check_threads_are_left(1)
