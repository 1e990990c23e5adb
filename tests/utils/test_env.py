"""What is read from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.utils.env import cache_folder


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
