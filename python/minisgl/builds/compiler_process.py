"""Runs compilers, and ends them with the process that waits for their results.

A separate program, which `compilers.py` starts. A compiler starts child processes, which survive
when it is killed. So each compiler leads a process group, and the groups are killed when this
program gets a signal: from the kernel, when the thread that started it has ended, or from Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


class _Failed(Exception):
    """A compiler failed; the message is its output."""


def main() -> int:
    """Run the stages from stdin, for the process whose id is the first argument."""
    signals = {signal.SIGCHLD, signal.SIGTERM}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signals.add(signal.SIGINT)
    # Blocked from here on: `sigwait` takes them, so none comes between a start and its record.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it ended before the call above
        return 1
    try:
        for stage in json.load(sys.stdin):
            _run(stage, signals)
    except (_Failed, OSError) as error:
        sys.stderr.write(str(error))
        return 1
    return 0


def _run(commands: Sequence[Sequence[str]], signals: set[signal.Signals]) -> None:
    """Run commands in parallel; the first that fails ends the others."""
    compilers: list[_Compiler] = []
    try:
        for number, command in enumerate(commands):
            compilers.append(_Compiler(command, Path(f"output-{number}"), signals))
        running = compilers
        while running:
            running = [compiler for compiler in running if compiler.is_running()]
            if running and signal.sigwait(signals) != signal.SIGCHLD:
                raise _Failed("interrupted")
    finally:
        for compiler in compilers:
            compiler.kill()


class _Compiler:
    """A command that runs in a process group of its own."""

    def __init__(self, command: Sequence[str], output: Path, signals: set[signal.Signals]) -> None:
        self._program = command[0]
        self._output = output
        with output.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),
            )

    def is_running(self) -> bool:
        """
        Raises:
            _Failed: it has failed.
        """
        status = self._process.poll()
        if status:
            # A killed compiler writes nothing.
            silent = f"{self._program} ends with {status} and says nothing"
            raise _Failed(self._output.read_text(errors="replace") or silent)
        return status is None

    def kill(self) -> None:
        """Kill it, if it still runs, and all processes that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
