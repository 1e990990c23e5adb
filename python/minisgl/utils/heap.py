"""What a thread takes from the heap, and what the C library gives back of it."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

_libc = ctypes.CDLL(None)


def bytes_touched() -> int:
    """Memory that this thread was the first to touch, since it began; it costs a microsecond.

    Memory that is used a second time does not count. Where the kernel uses huge pages for
    everything (`always` in /sys/kernel/mm/transparent_hugepage/enabled), large tables count less
    than they take.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt * resource.getpagesize()


def process_bytes_touched() -> int:
    """The same of all threads of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def thread_ids() -> set[int]:
    """The threads of this process, as the kernel numbers them."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def bytes_touched_by(thread_ids: set[int]) -> int:
    """Memory that some threads were the first to touch; it costs some ten microseconds a thread."""
    num_pages = 0
    for thread_id in thread_ids:
        stat = Path(f"/proc/self/task/{thread_id}/stat").read_text()
        num_pages += int(stat.rpartition(")")[2].split()[7])  # minflt, see proc(5)
    return num_pages * resource.getpagesize()


def return_free_memory() -> None:
    """Give free memory of the heap back to the kernel, if the C library can (glibc does)."""
    malloc_trim = getattr(_libc, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
