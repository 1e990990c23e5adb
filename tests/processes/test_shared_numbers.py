"""Numbers that processes share: no change is lost, and a process that dies locks nobody out."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.errors import ConfigError
from minisgl.processes.shared_numbers import SharedNumbers
from tests.full_disk import files_of_at_most

_COUNT = """
import sys
from pathlib import Path
from minisgl.processes.shared_numbers import SharedNumbers
shared = SharedNumbers(Path(sys.argv[1]), 4)
values = shared.array("count", 2)
for _ in range(2000):
    with shared.locked():
        values[1] += 1
"""
_DIE_IN_THE_LOCK = """
import os, signal, sys
from pathlib import Path
from minisgl.processes.shared_numbers import SharedNumbers
shared = SharedNumbers(Path(sys.argv[1]), 2)
values = shared.array("count", 2)
with shared.locked():
    values[1] = 7
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(program: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, str(folder)])


def test_no_change_of_several_processes_is_lost(tmp_path: Path) -> None:
    processes = [run(_COUNT, tmp_path) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert list(SharedNumbers(tmp_path, 4).array("count", 2)) == [0, 6000]


def test_a_process_that_is_killed_takes_its_lock_along(tmp_path: Path) -> None:
    assert run(_DIE_IN_THE_LOCK, tmp_path).wait() == -9
    shared = SharedNumbers(tmp_path, 2)
    values = shared.array("count", 2)
    with shared.locked():
        assert list(values) == [0, 7]


def test_the_disk_has_room_for_numbers_that_nobody_has_written(tmp_path: Path) -> None:
    """Else a write on a full disk ends the process by SIGBUS."""
    SharedNumbers(tmp_path, 2).array("count", 2)
    assert (tmp_path / "numbers.count").stat().st_blocks > 0


def test_the_file_of_an_array_is_gone_when_all_processes_have_it(tmp_path: Path) -> None:
    first, second = (SharedNumbers(tmp_path, 2) for _ in range(2))
    numbers = first.array("count", 2)
    assert (tmp_path / "numbers.count").exists()
    same_numbers = second.array("count", 2)
    assert not (tmp_path / "numbers.count").exists()
    numbers[1] = 7
    assert list(same_numbers) == [0, 7]


def test_a_full_disk_is_said_with_what_to_do(tmp_path: Path) -> None:
    shared = SharedNumbers(tmp_path)
    with files_of_at_most(8), pytest.raises(ConfigError, match=rf"{tmp_path}: .*; set TMPDIR to"):
        shared.array("count", 2)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/gone: No such file.*; set TMPDIR to"):
        SharedNumbers(tmp_path / "gone")


def test_what_no_disk_is_to_blame_for_names_no_folder_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ConfigError, match=rf"in {tmp_path}: Too many open files$"):
        SharedNumbers(tmp_path)


def test_without_a_folder_the_numbers_are_the_callers_own() -> None:
    shared = SharedNumbers()
    with shared.locked():
        shared.array("count", 1)[0] = 3
    assert list(shared.array("count", 1)) == [0]
