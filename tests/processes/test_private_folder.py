"""The folder of the sockets: nobody else can enter it, and it does not outlive its process."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from minisgl.errors import ConfigError
from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder, temporary_folder
from minisgl.processes.queues import PullQueue
from minisgl.utils.env import env_with_sys_path

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
OWNER = """
import sys
from minisgl.processes.private_folder import private_folder

with private_folder() as folder:
    (folder / "frontend").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temp(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A temporary folder of this test alone, with a short name: sockets are to be in it."""
    tmp_path_factory.getbasetemp()  # now: not in the folder below
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@contextlib.contextmanager
def owner_of_a_folder(temp: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has such a folder, and the folder."""
    env = {**env_with_sys_path(), "TMPDIR": str(temp)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


@pytest.fixture
def stale(temp: Path) -> Path:
    """A folder whose process was killed."""
    with owner_of_a_folder(temp) as (process, folder):
        process.kill()
    assert (folder / "frontend").exists()
    return folder


def test_only_this_user_can_enter_the_folder() -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_a_folder_for_it_the_error_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=r"none.*TMPDIR"), private_folder():
        pass


def test_two_servers_do_not_meet() -> None:
    with private_folder() as one, private_folder() as other:
        assert one != other


def test_the_folder_goes_with_its_sockets_also_after_an_error() -> None:
    with pytest.raises(KeyError), private_folder() as folder:
        pull = PullQueue(Addresses(folder).frontends[0], int.from_bytes)
        assert (folder / "frontend-0").exists()
        raise KeyError
    pull.close()

    assert not folder.exists()


def test_a_signal_just_after_the_folder_is_made_leaves_none(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def make_with_a_signal_after_it(path: str, mode: int = 0o777) -> None:
        make(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", make_with_a_signal_after_it)
    with pytest.raises(KeyboardInterrupt), private_folder():
        pass
    assert list(temp.iterdir()) == []


def test_the_folder_of_a_killed_process_goes_with_the_next_start(stale: Path) -> None:
    with private_folder() as folder:
        assert not stale.exists()
        assert folder.exists()


def test_the_folder_of_a_living_process_stays(temp: Path) -> None:
    with owner_of_a_folder(temp) as (process, folder):
        with private_folder():
            pass
        assert (folder / "frontend").exists()
        process.send_signal(signal.SIGKILL)


def test_a_folder_that_a_child_keeps_open_is_no_reason_to_keep_it(temp: Path) -> None:
    """Descriptors are not inherited: a program that the owner has started may live on."""
    with private_folder() as mine, subprocess.Popen(["sleep", "60"]) as child:
        descriptors = Path(f"/proc/{child.pid}/fd")
        assert not any(str(mine) in os.readlink(link) for link in descriptors.iterdir())
        child.kill()


def test_what_another_program_has_put_there_stays(temp: Path) -> None:
    """A folder without a lock may be being made, or be no folder of ours."""
    temp.joinpath("minisgl-empty").mkdir(mode=0o700)
    temp.joinpath("minisgl-kernels-x").mkdir(mode=0o700)
    temp.joinpath("minisgl-file").write_text("")
    before = set(temp.iterdir())
    with private_folder():
        pass
    assert set(temp.iterdir()) == before


def test_no_link_is_followed(stale: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    stale.rename(kept)
    stale.symlink_to(kept)
    with private_folder():
        pass
    assert stale.is_symlink()
    assert (kept / "frontend").exists()


def test_a_lock_that_is_a_link_opens_nothing(stale: Path, tmp_path: Path) -> None:
    (stale / "lock").rename(tmp_path / "lock")
    (stale / "lock").symlink_to(tmp_path / "lock")
    with private_folder():
        pass
    assert (stale / "frontend").exists()


def test_a_link_in_a_stale_folder_goes_and_what_it_leads_to_stays(
    stale: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (stale / "link").symlink_to(kept)
    with private_folder():
        pass
    assert not stale.exists()
    assert (kept / "file").exists()


def test_a_folder_that_others_can_enter_stays(stale: Path) -> None:
    stale.chmod(0o755)
    with private_folder():
        pass
    assert (stale / "frontend").exists()


@AS_ROOT
def test_a_folder_of_another_user_stays(stale: Path) -> None:
    os.chown(stale, NOBODY, NOBODY)
    with private_folder():
        pass
    assert (stale / "frontend").exists()


def test_folders_in_a_stale_folder_go_and_no_link_in_them_is_followed(
    stale: Path, tmp_path: Path
) -> None:
    """A compiler that was killed leaves some."""
    (tmp_path / "kept").touch()
    (stale / "folder").mkdir()
    (stale / "folder" / "link").symlink_to(tmp_path)
    with private_folder():
        pass
    assert not stale.exists()
    assert (tmp_path / "kept").exists()


def test_what_cannot_be_removed_is_no_error(stale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with private_folder() as folder:
            assert folder.exists()
    assert (stale / "frontend").exists()


def test_a_folder_without_sockets_may_be_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with temporary_folder() as folder:
        assert folder.exists()
    assert not list(deep.iterdir())


def test_a_folder_too_deep_for_a_socket_is_refused_and_left_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    with (
        pytest.raises(ConfigError, match=r"too long for a socket name; set TMPDIR"),
        private_folder(),
    ):
        pass
    assert not list(deep.iterdir())


@pytest.mark.parametrize("letter", ["d", "ö"])
def test_a_folder_that_is_not_refused_has_room_for_every_name(
    temp: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """However many bytes a letter has: it is bytes that the system counts."""
    longest = 0
    for length in range(1, 80):
        deep = temp / (letter * length)
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        with contextlib.suppress(ConfigError), private_folder() as folder:
            longest = max(longest, len(os.fsencode(folder / "tokenizer-99.9999")))

    assert zmq.IPC_PATH_MAX_LEN - 5 < longest <= zmq.IPC_PATH_MAX_LEN
