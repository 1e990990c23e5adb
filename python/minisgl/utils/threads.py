"""Threads where the system may have none left: start them early, and explain the failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from minisgl.errors import EngineFailed

_PYTHONS_WORDS = "can't start new thread"  # only they tell this RuntimeError from others
_RUSTS_WORD = "ThreadPoolBuildError"  # in a panic, which is a BaseException without a public type
_stack_size_is_ours = threading.Lock()  # it is the process's


def started_executor(
    name: str, num_threads: int = 1, stack_bytes: int | None = None
) -> ThreadPoolExecutor:
    """Make an executor whose threads already run, so that `submit` starts none.

    Args:
        stack_bytes: of each thread; None is the system's default.

    Raises:
        RuntimeError: the system has too few threads left.
    """
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    all_run = threading.Barrier(num_threads + 1)
    with _stack_size_is_ours:
        default_bytes = threading.stack_size(stack_bytes or 0)
        try:
            for _ in range(num_threads):
                executor.submit(all_run.wait)  # which starts a thread
        except RuntimeError:
            all_run.abort()
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            threading.stack_size(default_bytes)
    all_run.wait()
    return executor


def check_threads_are_left(number: int) -> None:
    """Start that many threads at once, and end them.

    To be called before a library that aborts the process if it gets no thread. Another process may
    still take the last ones in between.

    Raises:
        RuntimeError: the system has fewer left.
    """
    started_executor("check", number).shutdown()


@contextmanager
def lack_of_threads_is_explained() -> Iterator[None]:
    """Explain a lack of threads. For the main function of a process: any part may get no thread.

    Raises:
        EngineFailed: in place of the error of Python, or of a library in Rust, about it.
    """
    try:
        yield
    except BaseException as error:
        if str(error) != _PYTHONS_WORDS and _RUSTS_WORD not in str(error):
            raise
        raise EngineFailed(
            "the system starts no more threads; see ulimit -u, and pids.max of the control group"
        ) from error
