"""The processes of the clients, and how they end."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.processes.orphans import ends_with_its_program

START = """
from minisgl.benchmark.online.client import Endpoint
from minisgl.benchmark.online.load import _client_process, shares
from minisgl.benchmark.online.prompts import PromptMaker
from minisgl.benchmark.online.workloads import Shape, closed_loop

workload = closed_loop("w", Shape((1, 1), (1, 1)), 1, 1)
[part] = shares(workload, Endpoint("http://127.0.0.1:9/v1", "m"), PromptMaker(0), 1)
process = _client_process(part)
client = process.__enter__()
client.receive()
"""
SHOW_IGNORED_SIGNALS = r"""
import re
from pathlib import Path

status = Path(f"/proc/{client.process.pid}/status").read_text()
print(re.search(r"SigIgn:\s*(\w+)", status)[1], flush=True)
raise SystemExit(3)
"""


def test_clients_ignore_signals_and_do_not_keep_a_program_from_its_end() -> None:
    command = [sys.executable, "-c", START + SHOW_IGNORED_SIGNALS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    ignored = int(done.stdout, 16)
    for number in (signal.SIGINT, signal.SIGTERM):
        assert ignored >> (number - 1) & 1


def test_a_client_ends_with_its_program_even_if_that_is_killed() -> None:
    show_client = """
import signal
print(client.process.pid, flush=True)
signal.pause()
"""
    assert ends_with_its_program(START + show_client)
