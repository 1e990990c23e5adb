"""The processor time of a server's processes, some of which end while it is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from minisgl.benchmark.online.client import Endpoint
from minisgl.benchmark.online.processes import CpuMeter, find_server


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


def test_processes_that_share_a_socket_are_all_found() -> None:
    serve = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
listener.set_inheritable(True)
child = os.fork()  # as an API process that has the server's socket
if child:
    print(listener.getsockname()[1], child, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", serve]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        port, child = map(int, server.stdout.readline().split())
        found = find_server(Endpoint(f"http://127.0.0.1:{port}/v1", "any"), None)
        server.stdin.close()

    assert {each.pid for each in found} == {server.pid, child}
