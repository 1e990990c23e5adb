"""Whether a process ends with its parent, also one that cannot look whether that lives."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 30.0


def ends_with_its_parent(child: int, parent: int) -> bool:
    """Stop a process, kill its parent, and return whether it ends by that."""
    end = os.pidfd_open(child)  # readable when it ends, whoever collects it then
    try:
        os.kill(child, signal.SIGSTOP)  # else it would end when a pipe is closed
        os.kill(parent, signal.SIGKILL)
        ended, _, _ = select.select([end], [], [], _TIMEOUT_S)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        return bool(ended)
    finally:
        os.close(end)


def ends_with_its_program(program: str) -> bool:
    """The same of a process whose id a program prints, which then has to wait."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        return ends_with_its_parent(int(parent.stdout.readline()), parent.pid)
