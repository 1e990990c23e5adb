"""Threads that run before they are needed: later the system may have none left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


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
