"""Runs compilers that end with this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.utils.env import env_with_scratch

_PROGRAM = Path(__file__).with_name("compiler_process.py")


def run_compilers(stages: Sequence[Sequence[Sequence[str]]], folder: Path) -> None:
    """Run commands in a folder: those of a stage in parallel, one stage after the other.

    They end with this thread and this process, however these end, and with the first that fails.
    Their temporary files are in the folder, too.

    Raises:
        RuntimeError: one fails; the message is its output.
    """
    # Without the folders of packages, which it does not need: it starts in 20 ms.
    program = [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid())]
    with subprocess.Popen(
        program,
        cwd=folder,
        env=env_with_scratch(folder.absolute()),  # compilers that are killed leave files
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            _, failure = process.communicate(json.dumps(stages))
        except BaseException:  # Ctrl-C
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(failure)
