"""The C library's heap: its options, how much a thread takes from it, and how it is trimmed."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None)

# Of glibc's mallopt(3), which other libraries do not have.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next allocation.

    Every step frees and allocates megabytes of activations. If the memory went back to the system,
    each step would get zeroed pages, at one fault per page.
    """
    _set(_M_TRIM_THRESHOLD, 2**30)
    _set(_M_TOP_PAD, 2**26)
    _set(_M_MMAP_THRESHOLD, 2**25)


def use_one_heap() -> None:
    """Let all threads of this process allocate from one heap. To be called before they begin.

    Otherwise there are up to eight heaps per core, and memory that is freed in one of them does not
    serve the others. A process that answers requests would grow by megabytes per hour. Threads of
    Python seldom wait for the heap's lock, because the GIL lets them run one at a time anyway.
    """
    _set(_M_ARENA_MAX, 1)


def _set(option: int, value: int) -> None:
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def bytes_touched() -> int:
    """Memory that this thread was the first to touch, since it began; it costs a microsecond.

    Memory that is used a second time does not count. Where the kernel uses huge pages for
    everything (`always` in /sys/kernel/mm/transparent_hugepage/enabled), large tables count less
    than they take.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt * resource.getpagesize()


def process_bytes_touched() -> int:
    """The same for all threads of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def thread_ids() -> set[int]:
    """The threads of this process, as the kernel numbers them."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def bytes_touched_by(thread_ids: set[int]) -> int:
    """Memory that some threads were the first to touch; costs some ten microseconds per thread.

    Threads that have ended do not count.
    """
    num_pages = 0
    for thread_id in thread_ids:
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/self/task/{thread_id}/stat").read_text()
            num_pages += int(stat.rpartition(")")[2].split()[7])  # minflt, see proc(5)
    return num_pages * resource.getpagesize()


def return_free_memory() -> None:
    """Give free memory of the heap back to the kernel, if the C library can (glibc does)."""
    malloc_trim = getattr(_libc, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def return_free_memory_regularly(every_s: float = 60.0) -> None:
    """Give free memory of the heap back to the kernel in a thread, now and regularly.

    A process that has read a large vocabulary has 200 MiB of it.

    Blocks of all sizes are freed in any order. The gaps between live blocks are too small for the
    next large one, so the heap grows for hours though no more of it is in use. Returning the gaps
    takes about a millisecond.
    """
    threading.Thread(target=_return_regularly, args=(every_s,), name="heap", daemon=True).start()


def _return_regularly(every_s: float) -> None:
    while True:
        return_free_memory()
        time.sleep(every_s)
