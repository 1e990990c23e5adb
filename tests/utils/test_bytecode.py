"""Compiled Python is kept in the cache folder where it would be kept nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KEEP = """
from minisgl.utils.bytecode import keep_bytecode
keep_bytecode()
import sys, torch
print(torch.__cached__, sys.dont_write_bytecode)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package called torch, on a path of its own."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package


def imported(package: Path, **variables: str) -> tuple[Path, bool]:
    """Where a process that imports it keeps it, and whether it must not write."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]),
        "MINISGL_CACHE": str(package.parents[1] / "cache"),
        **variables,
    }
    output = subprocess.check_output([sys.executable, "-c", KEEP], env=env, text=True)
    path, must_not_write = output.split()
    return Path(path), must_not_write == "True"


def test_what_must_not_be_written_beside_the_source_is_kept_in_the_cache(package: Path) -> None:
    for _ in range(2):
        path, must_not_write = imported(package, PYTHONDONTWRITEBYTECODE="1")
        assert path.is_relative_to(package.parents[1] / "cache" / "bytecode")
        assert path.exists()
        assert not must_not_write
    assert not (package / "__pycache__").exists()


def test_another_source_of_the_same_size_and_time_is_compiled_anew(package: Path) -> None:
    """As of an image whose files all have one time, beside a cache folder that outlives it."""
    source = package / "__init__.py"
    paths = []
    for value in (111, 222):
        new = package / "new"
        new.write_text(f"value = {value}")
        os.utime(new, (10**9, 10**9))
        new.rename(source)
        path, _ = imported(package, PYTHONDONTWRITEBYTECODE="1")
        paths.append(path)
    assert paths[0] != paths[1]


def test_what_python_keeps_itself_stays_where_it_is(package: Path) -> None:
    path, _ = imported(package)
    assert path.parent == package / "__pycache__"
    assert path.exists()
    path, must_not_write = imported(package, PYTHONDONTWRITEBYTECODE="1")
    assert path.parent == package / "__pycache__"
    assert must_not_write


def test_a_folder_that_the_user_names_is_left_alone(package: Path, tmp_path: Path) -> None:
    named = tmp_path / "named"
    path, must_not_write = imported(
        package, PYTHONPYCACHEPREFIX=str(named), PYTHONDONTWRITEBYTECODE="1"
    )
    assert path.is_relative_to(named)
    assert must_not_write


def test_nothing_is_kept_where_others_can_write(package: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    path, must_not_write = imported(
        package, PYTHONDONTWRITEBYTECODE="1", MINISGL_CACHE=str(open_to_all / "cache")
    )
    assert path.parent == package / "__pycache__"
    assert must_not_write
    assert not list(open_to_all.rglob("*.pyc"))
