"""Limits time and memory while untrusted input is handled: of a process, or of a block of code."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM_BYTES = 256  # more than the seven numbers of the file can have
# How a process ends that gets no more memory, for its heap or its stack.
OUT_OF_MEMORY = (signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGSEGV)
OUT_OF_TIME = signal.SIGPROF
_CHECK_S = 0.02  # of CPU time, between two looks at what a block has taken
_CLEAN_UP_S = 0.5  # of CPU time, between two errors in a block
# Other threads get so much while a block has taken all of its own: libzmq drops a message, and its
# connection, for which it has no memory.
_BYTES_OF_OTHERS = 2**30


def limit_this_process(cpu_s: float, num_bytes: int) -> None:
    """Bound this process's CPU time, of all its threads, and its memory from now on."""
    address_space = _address_space() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:  # as after `ulimit -v`
        address_space = min(address_space, hard)
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


@contextmanager
def bounded(cpu_s: float, num_bytes: int) -> Iterator[None]:
    """Bound what a block takes, in the main thread of a process that does little else meanwhile.

    The kernel refuses a single allocation far beyond the memory; else a look at it ends the block,
    so that other threads do not run out of memory with it. A call that never returns to Python, as
    of the power of large numbers, is not ended.

    Raises:
        TimeoutError: in the block, when it has used its CPU time; again and again until it is left.
        MemoryError: it gets no more memory.
    """
    most_bytes = _address_space() + num_bytes
    end_s = time.process_time() + cpu_s

    def check(*_: object) -> None:
        is_late = time.process_time() >= end_s
        if not is_late and _address_space() <= most_bytes:
            return
        # Not at once: what the error ends cleans up. But code in the block may swallow it.
        signal.setitimer(signal.ITIMER_PROF, _CLEAN_UP_S, _CHECK_S)
        if is_late:
            raise TimeoutError(f"it takes more than {cpu_s:g} s of a processor")
        raise MemoryError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or most_bytes + _BYTES_OF_OTHERS < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes + _BYTES_OF_OTHERS, hard))
    previous = signal.signal(OUT_OF_TIME, check)
    try:
        signal.setitimer(signal.ITIMER_PROF, _CHECK_S, _CHECK_S)
        try:
            yield
        finally:  # before which the time may be over, too
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except MemoryError:
        raise MemoryError(f"it takes more than {num_bytes >> 20} MiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)  # the look itself may have got no memory
        signal.signal(OUT_OF_TIME, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def memory_bytes() -> int:
    """Resident memory of this process, without pages of files, as its code is in."""
    return (_num_pages(1) - _num_pages(2)) * _PAGE_BYTES


def _address_space() -> int:
    """Bytes of it, used or not."""
    return _num_pages(0) * _PAGE_BYTES


def _num_pages(column: int) -> int:
    """A number of /proc/self/statm: 0 the address space, 1 what is resident, 2 of files."""
    # Each chat waits for it: a `Path` takes seven times as long.
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        numbers = os.read(file, _STATM_BYTES).split()
    finally:
        os.close(file)
    return int(numbers[column])
