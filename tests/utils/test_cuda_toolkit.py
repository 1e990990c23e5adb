"""Where CUDA's compiler is found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest

from minisgl.utils import cuda_toolkit
from minisgl.utils.cuda_toolkit import find_cuda_toolkit
from minisgl.utils.env import let_flashinfer_compile


def make(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("#!/bin/sh\n")
        (folder / file).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_toolkit, "_DEFAULT_HOME", tmp_path / "default")
    monkeypatch.setattr(cuda_toolkit.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cuda_toolkit, "_path_of_driver", lambda: tmp_path / "libcuda.so.1")


def have_pip_packages(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """pip's packages, as they were of nvidia-cuda-nvcc, -crt and -runtime 13.0 and nvidia-nvvm."""
    spec = SimpleNamespace(submodule_search_locations=[str(folder / "nvidia")])
    monkeypatch.setattr(cuda_toolkit.importlib.util, "find_spec", lambda name: spec)
    return make(
        folder / "nvidia" / "cu13",
        *cuda_toolkit._FILES_OF_PIP,
        "lib/libcudart.so.13",
        "lib/libcudadevrt.a",
    )


def test_there_may_be_none(tmp_path: Path) -> None:
    assert find_cuda_toolkit() is None
    make(tmp_path / "default", "bin/nvcc")  # without headers
    assert find_cuda_toolkit() is None


def test_cuda_home_comes_first_and_pip_before_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found() -> Path:
        toolkit = find_cuda_toolkit()
        assert toolkit is not None
        assert toolkit.nvcc == toolkit.home / "bin" / "nvcc"
        return toolkit.home

    default = make(tmp_path / "default", "bin/nvcc", "include/cuda_runtime.h")
    assert found() == default
    of_path = make(tmp_path / "of_path", "bin/nvcc", "include/cuda_runtime.h")
    monkeypatch.setenv("PATH", str(of_path / "bin"))
    assert found() == of_path
    have_pip_packages(monkeypatch, tmp_path / "site")
    assert found().parent == tmp_path / "cache" / "cuda"
    home = make(tmp_path / "home", "bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert found() == home


def test_a_cuda_home_without_a_compiler_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make(tmp_path / "default", "bin/nvcc", "include/cuda_runtime.h")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert find_cuda_toolkit() is None


def test_a_wrapper_in_path_is_not_taken_for_a_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(make(tmp_path / "wrapper", "bin/nvcc") / "bin"))
    default = make(tmp_path / "default", "bin/nvcc", "include/cuda_runtime.h")
    toolkit = find_cuda_toolkit()
    assert toolkit is not None
    assert toolkit.home == default


def test_linkers_find_the_libraries_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = have_pip_packages(monkeypatch, tmp_path / "site")
    toolkit = find_cuda_toolkit()
    assert toolkit is not None
    links = {link.name: link.readlink() for link in (toolkit.home / "lib64").iterdir()}
    assert links == {
        "libcudart.so": folder / "lib" / "libcudart.so.13",
        "libcudart_static.a": folder / "lib" / "libcudart_static.a",
        "libcudadevrt.a": folder / "lib" / "libcudadevrt.a",
        "libcuda.so": tmp_path / "libcuda.so.1",
    }
    assert (toolkit.home / "bin" / "nvcc").samefile(folder / "bin" / "nvcc")
    (folder / "lib" / "libcudart.so.13").rename(folder / "lib" / "libcudart.so.14")
    assert find_cuda_toolkit() == toolkit
    assert (toolkit.home / "lib64" / "libcudart.so").exists()


def test_two_threads_find_the_toolkit_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels are built side by side, and the first builds on a machine make the links."""
    have_pip_packages(monkeypatch, tmp_path / "site")
    both = Barrier(2, timeout=60)
    symlink_to = Path.symlink_to

    def symlink_together(link: Path, target: Path) -> None:
        both.wait()
        try:
            symlink_to(link, target)
        except OSError:
            both.abort()
            raise
        both.wait()

    monkeypatch.setattr(Path, "symlink_to", symlink_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: find_cuda_toolkit(), range(2))
    assert first is not None
    assert first == second
    links = sorted(link.name for link in first.home.iterdir())
    assert links == ["bin", "include", "lib64", "nvvm"]


@pytest.mark.parametrize("missing", cuda_toolkit._FILES_OF_PIP)
def test_half_of_pips_packages_are_no_toolkit(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (have_pip_packages(monkeypatch, tmp_path / "site") / missing).unlink()
    assert find_cuda_toolkit() is None


def test_flashinfer_finds_the_toolkit_and_ninja(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", "before")
    for _ in range(2):
        let_flashinfer_compile(tmp_path)
    assert cuda_toolkit.os.environ["CUDA_HOME"] == str(tmp_path)
    first, *programs = cuda_toolkit.os.environ["PATH"].split(":")
    assert first == str(tmp_path / "empty")
    assert len(programs) == 1
    assert (Path(programs[0]) / "python").exists()
