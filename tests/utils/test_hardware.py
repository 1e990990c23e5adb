"""The machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl.errors import ConfigError
from minisgl.utils import hardware
from minisgl.utils.hardware import (
    Hardware,
    available_memory,
    check_proc,
    detect_hardware,
    guess_hardware,
    share_processors,
)


def test_the_hardware_is_one_that_can_be_used() -> None:
    found = detect_hardware()

    assert found.device in ("cpu", "cuda")
    assert (found.device == "cuda") == (found.num_devices > 0)


def test_available_memory_is_less_than_there_is() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert 0 < available_memory() < total


@pytest.mark.parametrize("fails", [check_proc, available_memory])
def test_a_proc_that_is_not_mounted_is_said_in_one_line(
    fails: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container of its own making, or without `self` where it is of another namespace."""
    fails()
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    with pytest.raises(ConfigError) as refusal:
        fails()
    assert re.fullmatch(
        r"/proc must be mounted and readable: [^\n]+ says: No such file or directory",
        str(refusal.value),
    )


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("50000000", "30000000", 25_000_000), ("10000000", "30000000", 0)],
)
def test_cached_files_of_a_control_group_can_be_given_up(
    limit: str, used: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is mapped counts as used there, as often as its files are read."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    stat = "anon 9000000\nfile 6000000\ninactive_file 4000000\nactive_file 1000000\n"
    (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr(hardware, "_CONTROL_GROUP", tmp_path)
    assert available_memory() == expected

    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > expected


@pytest.mark.parametrize(
    ("of_the_user", "spin_count"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_threads_sleep_soon_unless_the_user_wants_otherwise(
    of_the_user: dict[str, str], spin_count: str
) -> None:
    """In a process of its own, in which GNU's OpenMP says what it has read."""
    script = """
import os
from minisgl.utils.hardware import short_waits
before = dict(os.environ)
with short_waits():
    import torch
assert dict(os.environ) == before
"""
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    others = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**others, "OMP_DISPLAY_ENV": "verbose", **of_the_user},
    )
    assert f"GOMP_SPINCOUNT = '{spin_count}'" in done.stderr


@pytest.mark.parametrize(
    ("of_the_user", "num_processes", "num_threads"),
    [(None, 1, 6), ("", 1, 6), (None, 4, 1), (None, 7, 1), ("3", 1, None), ("3", 4, None)],
)
def test_processes_share_the_processors_unless_the_user_wants_otherwise(
    of_the_user: str | None,
    num_processes: int,
    num_threads: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_the_user is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", of_the_user)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    share_processors(num_processes)
    assert chosen == ([num_threads] if num_threads else [])


def test_memory_moves_to_huge_pages_unchanged_and_untouched_memory_stays_unallocated() -> None:
    """In a process of its own: all of its memory moves."""
    script = """
import mmap, re
from pathlib import Path
from minisgl.utils.hardware import use_huge_pages

def kilobytes(name):
    return int(re.search(name + r": +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

written = mmap.mmap(-1, 2**25, flags=mmap.MAP_PRIVATE)
written[:] = b"x" * 2**25
untouched = mmap.mmap(-1, 2**27, flags=mmap.MAP_PRIVATE)
resident = kilobytes("Rss")
use_huge_pages()
assert kilobytes("Rss") - resident < 2**16
assert written[:] == b"x" * 2**25
print(kilobytes("AnonHugePages"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this system has no huge pages")
    release = [int(number) for number in os.uname().release.split(".")[:2]]
    if release >= [6, 1]:
        assert int(done.stdout) >= 2**14


@pytest.mark.parametrize(
    ("num_gpus", "major", "expected"),
    [
        (2, 9, Hardware("cuda", has_bf16=True, num_devices=2)),
        (1, 7, Hardware("cuda", has_bf16=False, num_devices=1)),
    ],
)
def test_the_driver_tells_what_torch_will_find(
    num_gpus: int, major: int, expected: Hardware
) -> None:
    driver = SimpleNamespace(num_gpus=num_gpus, capability=lambda gpu: (major, 0))
    assert guess_hardware(driver) == expected  # type: ignore[arg-type]


def test_without_a_gpu_the_hardware_is_a_cpu() -> None:
    assert guess_hardware(None) == guess_hardware(SimpleNamespace(num_gpus=0))  # type: ignore[arg-type]
    assert guess_hardware(None).device == "cpu"
    if not torch.cuda.is_available():
        assert guess_hardware(None) == detect_hardware()
