"""Figures: what was measured, how, where and with which versions; one JSON line each."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

_PACKAGES = ("minisgl", "torch", "transformers", "triton", "flashinfer-python", "vllm", "sglang")


def machine() -> str:
    """Name the GPU and count the GPUs, or else the processor and its cores."""
    import torch  # takes seconds; clients of a server elsewhere do without

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def versions() -> dict[str, str]:
    """The versions of Python and of the compared packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the working folder, marked "dirty" if files differ; "unknown" without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def today() -> str:
    """The date in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def command() -> str:
    """The command line of this program, quoted for a shell."""
    return shlex.join(["python", *sys.argv])


def provenance() -> dict[str, object]:
    """The origin of a result, with which lines begin that are not figures."""
    return {
        "commit": commit(),
        "date": today(),
        "machine": machine(),
        "versions": versions(),
        "command": command(),
    }


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: `value` is the median of `values`, the repetitions."""

    engine: str
    workload: str
    model: str
    device: str
    metric: str
    values: list[float]
    tp: int = 1
    value: float = field(default=0.0)
    command: str = field(default_factory=command)
    commit: str = field(default_factory=commit)
    machine: str = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    date: str = field(default_factory=today)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", statistics.median(self.values))


def append_figures(path: Path, figures: list[Figure]) -> None:
    """Add figures to a file of JSON lines; older lines stay as history."""
    with path.open("ab") as file:
        for figure in figures:
            file.write(msgspec.json.encode(figure) + b"\n")
