"""A child process has a name, and ends with its parent."""

from __future__ import annotations

import select
import subprocess
import sys

CHILD = """
import sys, time
from minisgl.processes.child import die_with_parent
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid())])
"""


def test_a_process_is_shown_by_its_name() -> None:
    script = """
from pathlib import Path
from minisgl.processes.child import name_process
name_process("scheduler-0")
print(Path("/proc/self/comm").read_text(), end="")
"""
    shown = subprocess.check_output([sys.executable, "-c", script], text=True)

    assert shown == "scheduler-0\n"


def test_a_child_dies_with_its_parent_even_if_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()

        has_ended, *_ = select.select([parent.stdout], [], [], 10)  # the child holds the other end
        assert has_ended
        assert parent.stdout.read() == b""
