"""What the machine is: processor, memory, and how a child process is tied to its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device that "auto" means here, and what it can do."""

    device: str
    has_bf16: bool
    num_devices: int


def detect_hardware() -> Hardware:
    import torch  # here: of those that import this file only schedulers need it

    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(
            including_emulation=False
        )  # which no rank tries on another's GPU
        return Hardware("cuda", has_bf16, torch.cuda.device_count())
    return Hardware("cpu", _cpu_has_bf16(), 0)


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware; without, bf16 is slower than float32."""
    flags = (
        Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    )
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping, within this process's control group."""
    with open("/proc/meminfo") as info:
        fields = dict(line.split(":", 1) for line in info)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for the next allocation, instead of giving it back to the system.

    A step frees and takes the same megabytes of activations again and again; each time the system would hand out zeroed
    pages, one fault each.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    for parameter, value in ((trim_threshold, 2**30), (top_pad, 2**26), (mmap_threshold, 2**25)):
        if mallopt:
            mallopt(parameter, value)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)
