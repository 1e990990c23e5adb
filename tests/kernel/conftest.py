"""Fixtures of the kernels' tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from tvm_ffi import libinfo

from minisgl.kernel import cuda_kernels_for, native

STAND_IN = Path(__file__).with_name("cuda_on_cpu")
OPTIONS = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-U_FORTIFY_SOURCE",  # it would take threads that are contexts for broken stacks
    "-fno-strict-aliasing",
    "-fsanitize=undefined",
    "-fno-sanitize=vptr",
    "-fsanitize-undefined-trap-on-error",
    f"-I{STAND_IN}",
    f"-I{libinfo.find_include_path()}",
    f"-I{libinfo.find_dlpack_include_path()}",
]


@pytest.fixture(autouse=True)
def two_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels of a CPU divide their work over threads; the other tests have one thread each."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)


@pytest.fixture(scope="session")
def cuda_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions of csrc/*.cu on a GPU, or else built for a CPU, with those of control.cpp."""
    if torch.cuda.is_available():
        built = cuda_kernels_for(torch.empty(0, dtype=torch.bfloat16, device="cuda"))
        return built or pytest.skip("there is no nvcc")
    folder = shared_folder(tmp_path_factory) / "cuda_on_cpu"
    folder.mkdir(exist_ok=True)
    library = folder / "cuda_on_cpu.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            compile_for_a_cpu(folder, library)
    return tvm_ffi.load_module(str(library))


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, for all processes that run its tests."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def compile_for_a_cpu(folder: Path, library: Path) -> None:
    sources = [*Path(native.__file__).with_name("csrc").glob("*.cu"), STAND_IN / "control.cpp"]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [
        ["c++", *OPTIONS, "-x", "c++", "-c", str(source), "-o", made]
        for source, made in zip(sources, objects, strict=True)
    ]
    # One a core: servers that other tests start would wait for all of them.
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        for compilation in [compilers.submit(subprocess.run, it, check=True) for it in commands]:
            compilation.result()
    ffi_folder = Path(libinfo.find_libtvm_ffi()).parent
    link = ["c++", "-shared", *objects, "-o", str(library), f"-L{ffi_folder}", "-ltvm_ffi"]
    subprocess.run(link, check=True)
