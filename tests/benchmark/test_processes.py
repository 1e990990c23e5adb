"""The processor time of a server's processes, some of which end while it is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from minisgl.benchmark.online.processes import CpuMeter


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes of one name, by age, that wait."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    yield started
    for child in started:
        child.kill()
        child.communicate()


def test_a_process_that_ends_meanwhile_has_no_share(
    children: list[subprocess.Popen[bytes]],
) -> None:
    processes = [psutil.Process(child.pid) for child in children]
    meter = CpuMeter(processes)
    first, _, last = meter.shares()
    _, ending, _ = sorted(children, key=lambda child: child.pid)
    ending.communicate()

    assert list(meter.shares()) == [first, last]


def test_a_process_that_has_ended_before_has_no_share(
    children: list[subprocess.Popen[bytes]],
) -> None:
    processes = [psutil.Process(child.pid) for child in children]
    children[0].communicate()

    assert len(CpuMeter(processes).shares()) == 2
