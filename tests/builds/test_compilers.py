"""Compilers run side by side, and end with whoever waits for them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.builds.compilers import run_compilers

# As CUDA's compiler: it starts another program, and waits for it.
COMPILER = """
import subprocess, sys
from pathlib import Path
child = subprocess.Popen(["sleep", "300"])
Path(sys.argv[1]).write_text(str(child.pid))
child.wait()
"""
WAITING = """
import sys
from pathlib import Path
from minisgl.builds.compilers import run_compilers
run_compilers([[[sys.executable, "-c", sys.argv[1], "pid"]]], Path(sys.argv[2]))
"""


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def has_pid(file: Path) -> bool:
    return file.exists() and file.read_text() != ""


def test_a_stage_runs_side_by_side_and_after_the_one_before(tmp_path: Path) -> None:
    waits_for = "while [ ! -e {} ]; do sleep 0.01; done; touch {}"
    stages = [
        [shell(waits_for.format("b", "a")), shell("touch b")],
        [shell("cat a b && touch c")],
    ]
    run_compilers(stages, tmp_path)
    assert (tmp_path / "c").exists()


def test_what_the_failing_one_wrote_is_told_and_the_others_end(tmp_path: Path) -> None:
    slow = [sys.executable, "-c", COMPILER, "pid"]
    fails = shell(
        "while [ ! -s pid ]; do sleep 0.01; done; echo out; echo no such flag >&2; exit 2"
    )
    with pytest.raises(RuntimeError, match=r"\Aout\nno such flag\n\Z"):
        run_compilers([[slow, fails], [shell("touch linked")]], tmp_path)
    assert not runs(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "linked").exists()


def test_what_killed_compilers_leave_goes_with_the_folder(tmp_path: Path) -> None:
    """They cannot remove their temporary files."""
    run_compilers([[shell('echo "$TMPDIR" > where')]], tmp_path)
    assert (tmp_path / "where").read_text() == f"{tmp_path}\n"


def test_a_compiler_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'no-compiler'"):
        run_compilers([[shell("sleep 300"), ["no-compiler", "-c"]]], tmp_path)


def test_a_compiler_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"\Ash ends with -9 and says nothing\Z"):
        run_compilers([[shell("kill -9 $$")]], tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_compilers_end_with_the_process_that_waits_for_them(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Also what they have started ends, which no signal reaches."""
    command = [sys.executable, "-c", WAITING, COMPILER, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: has_pid(tmp_path / "pid"))
        pid = int((tmp_path / "pid").read_text())
        assert runs(pid)
        process.send_signal(number)
        process.wait(30)
        wait_until(lambda: not runs(pid))
