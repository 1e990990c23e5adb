"""What is read from the environment."""

from __future__ import annotations

import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.builds import library_folder
from minisgl.errors import ConfigError
from minisgl.utils.env import cache_folder, env_for_forks


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"MINISGL_CACHE": "/a/b"}, Path("/a/b")),
        ({"MINISGL_CACHE": "", "XDG_CACHE_HOME": "/x"}, Path("/x/minisgl")),
        ({"HOME": "/home/me"}, Path("/home/me/.cache/minisgl")),
        ({"HOME": "/home/me", "MINISGL_CACHE": "~/c"}, Path("/home/me/c")),
    ],
)
def test_the_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: Path
) -> None:
    for name in ("MINISGL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_folder() == folder


@pytest.mark.parametrize("name", ["MINISGL_CACHE", "XDG_CACHE_HOME"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("~nobody-of-this-name/x", "no path: Could not determine home directory"),
        ("x" * 5000, r"'x{50}'\.\.\. has 5000 bytes, a folder at most 1024$"),
        ("/" + "x" * 256, "no path: File name too long"),
    ],
    ids=["no_such_user", "long_path", "long_name"],
)
def test_a_cache_folder_that_can_be_no_path_is_refused_with_its_variable(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINISGL_CACHE", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}: .*{reason}"):
        cache_folder()


def test_without_a_home_folder_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINISGL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_such_user(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    with pytest.raises(
        ConfigError, match=r"^HOME: .*home directory.*; set MINISGL_CACHE to a folder"
    ):
        cache_folder()


def test_without_a_cache_folder_kernels_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(OSError, match=r"MINISGL_CACHE: .* is no path"):
        library_folder()


def test_a_process_that_forks_itself_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others its forks would lack. On one core numpy would start none."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code = "import llguidance.numpy, os; print(len(os.listdir('/proc/self/task')))"

    result = subprocess.run(
        [sys.executable, "-c", code], env=env_for_forks(), capture_output=True, check=True
    )

    assert result.stdout == b"1\n"
