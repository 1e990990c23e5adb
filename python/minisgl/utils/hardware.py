"""The machine: its devices and its memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import ConfigError
from minisgl.utils.driver import GpuDriver
from minisgl.utils.env import num_openmp_threads, openmp_spins

_MADV_HUGEPAGE = 14  # madvise(2)
_MADV_COLLAPSE = 25
_HUGE_PAGE = 1 << 21
_FIRST_WITH_BF16 = 8  # compute capability
_PROC = Path("/proc")
_CONTROL_GROUP = Path("/sys/fs/cgroup")  # version 2


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device that "auto" stands for, and what it can do.

    Attributes:
        device: "cuda" or "cpu".
        has_bf16: whether the device multiplies bf16 in hardware.
        num_devices: GPUs; 0 on a CPU.
    """

    device: str
    has_bf16: bool
    num_devices: int


def detect_hardware() -> Hardware:
    # Imported here: processes without torch import this file too.
    import torch

    if torch.cuda.is_available():
        # Asked about emulation, torch would allocate memory on the first GPU from every rank.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return Hardware("cuda", has_bf16, torch.cuda.device_count())
    return Hardware("cpu", _cpu_has_bf16(), 0)


def guess_hardware(driver: GpuDriver | None) -> Hardware:
    """The likely result of `detect_hardware`, without torch, which may be built for CPUs only."""
    if driver is None or driver.num_gpus == 0:
        return Hardware("cpu", _cpu_has_bf16(), 0)
    major, _ = driver.capability(0)
    return Hardware("cuda", major >= _FIRST_WITH_BF16, driver.num_gpus)


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware. If not, bf16 is slower than float32."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    flags = cpuinfo.read_text(errors="replace")
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def check_proc() -> None:
    """
    Raises:
        ConfigError: there is no /proc, where processes read how much memory they take.
    """
    _read_proc("self/statm")


def _read_proc(name: str) -> str:
    file = _PROC / name
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(
            f"/proc must be mounted and readable: {file} says: {error.strerror}"
        ) from None


def available_memory() -> int:
    """Bytes of host memory that this process's control group can allocate without swapping.

    Raises:
        ConfigError: /proc is not readable.
    """
    fields = dict(line.split(":", 1) for line in _read_proc("meminfo").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        stat = (_CONTROL_GROUP / "memory.stat").read_text()
    except OSError:
        return free
    if limit == "max":
        return free
    # Cached files, such as a checkpoint that was read, count as used but can be reclaimed.
    counts = dict(line.split() for line in stat.splitlines())
    cached = sum(int(counts[name]) for name in ("inactive_file", "active_file"))
    return max(0, min(free, int(limit) - used + cached))


@contextmanager
def short_waits() -> Iterator[None]:
    """If torch is imported within, its threads spin for 0.1 ms when they wait, and then sleep.

    By default the threads of GNU's OpenMP spin for milliseconds. If another program, or the API
    process, has the core of a thread that has work, that thread cannot run on the cores where
    others spin. The user's own setting holds, and so does that of a torch that is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    with openmp_spins(5000):
        yield


def share_processors(num_processes: int) -> None:
    """Set torch's number of threads to this process's share of the processors.

    A number that the user chose by OMP_NUM_THREADS holds.

    Args:
        num_processes: the processes that share the processors.
    """
    import torch

    if not num_openmp_threads():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))


def use_huge_pages() -> None:
    """Move this process's memory to huge pages, where Linux can (at once since 6.1).

    A step on a CPU reads all weights. With pages of 4 KiB, TLB misses cost it a third of the
    memory's speed. Memory that was never written stays unallocated.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in maps.read_text().splitlines():
        addresses, permissions, _, _, inode = line.split()[:5]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if permissions == "rw-p" and inode == "0" and end - start >= _HUGE_PAGE:
            madvise(start, end - start, _MADV_HUGEPAGE)
            # One by one: the call ends at the first page that cannot be moved.
            for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end, _HUGE_PAGE):
                madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)
