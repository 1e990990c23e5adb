"""Threads where the system may have none left: they run before they are needed, or that is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from minisgl.errors import EngineFailed

_PYTHONS_WORDS = "can't start new thread"  # a RuntimeError as many others, but for them


def started_executor(
    name: str, num_threads: int = 1, stack_bytes: int | None = None
) -> ThreadPoolExecutor:
    """Make an executor whose threads run already, so that `submit` starts none.

    Args:
        stack_bytes: of each thread; None is the system's default.

    Raises:
        RuntimeError: the system has too few threads left.
    """
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    all_run = threading.Barrier(num_threads + 1)
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


@contextmanager
def lack_of_threads_is_explained() -> Iterator[None]:
    """For the border of a process: any part of it may be the one that gets no thread.

    Raises:
        EngineFailed: in the place of the error of Python that says so.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) != _PYTHONS_WORDS:
            raise
        raise EngineFailed(
            "the system starts no more threads; see ulimit -u, and pids.max of the control group"
        ) from error
