"""Places that other users of the machine cannot write. These tests run as any user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl.utils.ownership import is_own_file, make_own_folder

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_folder_is_open_to_this_user_only(tmp_path: Path) -> None:
    folder = make_own_folder(tmp_path / "a" / "b")
    assert mode(folder) == 0o700


@pytest.mark.parametrize("before", [0o755, 0o777])
def test_a_folder_of_this_user_is_closed_to_others(before: int, tmp_path: Path) -> None:
    tmp_path.joinpath("kept").mkdir()
    tmp_path.joinpath("kept").chmod(before)
    assert mode(make_own_folder(tmp_path / "kept")) == 0o700


def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "everybody"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(PermissionError, match=r"everybody.* can be changed by other users"):
        make_own_folder(above / "kernels")
    above.chmod(0o1777)  # as /tmp: only the owner of an entry can rename it
    assert make_own_folder(above / "kernels").exists()


@AS_ROOT
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to another user"):
        make_own_folder(tmp_path)
    with pytest.raises(PermissionError, match="can be changed by other users"):
        make_own_folder(tmp_path / "below")


def test_a_link_is_no_own_file_but_what_it_leads_to_may_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    file.chmod(0o644)
    tmp_path.joinpath("link").symlink_to(file)
    assert is_own_file(file)
    assert not is_own_file(tmp_path / "link")
    assert not is_own_file(tmp_path / "missing")
    assert not is_own_file(tmp_path)


def test_a_file_that_others_can_write_is_not_our_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    file.chmod(0o666)
    assert not is_own_file(file)


@AS_ROOT
def test_a_file_of_another_user_is_not_our_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    os.chown(file, NOBODY, NOBODY)
    assert not is_own_file(file)
