"""A library is made once, whoever asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minisgl.builds import Library, library, library_folder

# Says that it runs, waits a moment in which others come, and makes what it is asked for.
COMPILER = """#!/bin/sh
echo "$@" >> {log}
sleep 0.1
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && echo made > "$2"
    shift
done
"""
MAKE = """
import sys
from pathlib import Path
from minisgl.builds import Library
folder = Path(sys.argv[2])
print(Library("x-1", sys.argv[1], [["-c", "-o", "x.o"]], ["x.o"]).make_in(folder).read_text())
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A line for each call of the compiler."""
    log = tmp_path / "log"
    log.touch()
    return log


@pytest.fixture
def compiler(tmp_path: Path, log: Path) -> str:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o700)
    return str(compiler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "libraries"
    folder.mkdir(mode=0o700)
    return folder


def a_library(compiler: str) -> Library:
    return Library("x-1", compiler, [["-c", "-o", "x.o"], ["-c", "-o", "y.o"]], ["x.o", "y.o"])


def test_all_is_compiled_then_linked_then_kept(compiler: str, folder: Path, log: Path) -> None:
    made = a_library(compiler).make_in(folder)
    assert made == folder / "x-1.so"
    assert made.read_text() == "made\n"
    *compiled, linked = log.read_text().splitlines()
    assert sorted(compiled) == ["-c -o x.o", "-c -o y.o"]
    assert linked == "x.o y.o -o made.so"
    assert a_library(compiler).make_in(folder) == made
    assert len(log.read_text().splitlines()) == 3


def test_what_is_kept_needs_no_compiler(compiler: str, folder: Path) -> None:
    without_compiler = Library("x-1", None, [], [])
    assert not without_compiler.is_in(folder)
    a_library(compiler).make_in(folder)
    assert without_compiler.is_in(folder)
    assert without_compiler.make_in(folder) == folder / "x-1.so"


def test_threads_that_need_a_library_compile_it_once(
    compiler: str, folder: Path, log: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: a_library(compiler).make_in(folder), range(4)))
    assert made == [folder / "x-1.so"] * 4
    assert len(log.read_text().splitlines()) == 3


def test_processes_that_need_a_library_compile_it_once(
    compiler: str, folder: Path, log: Path
) -> None:
    command = [sys.executable, "-c", MAKE, compiler, str(folder)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [rank.communicate()[0].strip() for rank in ranks] == ["made"] * 3
    assert len(log.read_text().splitlines()) == 2


def test_a_failure_leaves_nothing_and_the_next_one_tries_again(compiler: str, folder: Path) -> None:
    working = Path(compiler).read_text()
    Path(compiler).write_text("#!/bin/sh\necho no such flag >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="no such flag"):
        a_library(compiler).make_in(folder)
    assert not [path for path in folder.iterdir() if path.suffix != ".lock"]

    Path(compiler).write_text(working)
    assert a_library(compiler).make_in(folder).exists()


def test_a_process_that_is_killed_while_it_compiles_holds_nobody_up(
    compiler: str, folder: Path, tmp_path: Path
) -> None:
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\ntouch begun; sleep 300\n")
    endless.chmod(0o700)
    with subprocess.Popen([sys.executable, "-c", MAKE, str(endless), str(folder)]) as killed:
        while not list(folder.glob("*/begun")):
            time.sleep(0.01)
        killed.kill()
    assert a_library(compiler).make_in(folder).exists()


def test_what_was_left_long_ago_is_removed(compiler: str, folder: Path) -> None:
    """Another host may still compile what is new, where locks do not hold over hosts."""
    old = folder / "scratch-old"
    new = folder / "scratch-new"
    for scratch in (old, new):
        (scratch / "part").mkdir(parents=True)
    os.utime(old, (0, 0))
    made = a_library(compiler).make_in(folder)
    assert set(folder.iterdir()) == {made, folder / "x-1.lock", new}


def test_where_files_cannot_be_locked_it_is_made_all_the_same(
    compiler: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(library.fcntl, "flock", fail)
    assert a_library(compiler).make_in(folder).exists()


def test_a_library_that_others_can_write_is_made_anew(compiler: str, folder: Path) -> None:
    (folder / "x-1.so").write_text("foreign")
    (folder / "x-1.so").chmod(0o777)
    assert a_library(compiler).make_in(folder).read_text() == "made\n"


def test_the_folder_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    assert library_folder() == (tmp_path / "cache" / "kernels").resolve()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(PermissionError):
        library_folder()


def test_the_headers_and_the_library_that_all_are_linked_with_are_found() -> None:
    (include,) = library.ffi_include_options()
    folder = Path(include.removeprefix("-I"))
    assert (folder / "tvm" / "ffi" / "c_api.h").exists()
    assert (folder / "dlpack" / "dlpack.h").exists()
    where, what = library.ffi_link_options()
    assert what == "-ltvm_ffi"
    assert (Path(where.removeprefix("-L")) / "libtvm_ffi.so").exists()
