"""Standard streams that were closed when a program was started."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import os, subprocess, sys
from minisgl.utils.standard_streams import open_closed_streams

open_closed_streams()
for stream in (sys.stdout, sys.stderr):
    print("lost", file=stream, flush=True)
for descriptor in range(3):
    os.fstat(descriptor)
assert os.dup(0) > 2
code = "import sys; assert None not in (sys.stdin, sys.stdout, sys.stderr)"
sys.exit(subprocess.run([sys.executable, "-c", code], close_fds=True).returncode)
"""


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_program_and_its_children_have_all_streams(closed: tuple[int, ...]) -> None:
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed)
    shell = f'exec "$0" -c "$1" {redirections}'
    program = ["sh", "-c", shell, sys.executable, _PROGRAM]
    assert subprocess.run(program, timeout=60).returncode == 0
