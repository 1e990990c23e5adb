"""Compiles the kernels of csrc/ once for this processor and keeps them in the cache folder.

A library is code. It is kept in a folder, and loaded from a file, that no other user can write;
where the cache folder is not such a place, each process compiles its own.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi import libinfo

from minisgl.kernel.cpu_graph import CpuKernels
from minisgl.utils.cuda_toolkit import find_cuda_toolkit
from minisgl.utils.env import cache_folder
from minisgl.utils.ownership import is_own_file, make_own_folder

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_CPU_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp"]
_CPU_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
_CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC"]
# Two threads that need a library compile it once.
_LOCKS = {"cpu": threading.Lock(), "gpu": threading.Lock()}


@dataclass(frozen=True, slots=True)
class _Compiler:
    """
    Attributes:
        command: None if there is no compiler; then only a library that is kept can be loaded.
    """

    command: str | None
    flags: list[str]
    link_flags: list[str] = field(default_factory=list)


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """Return the functions of *.cpp; None, with a warning, if they cannot be compiled here."""
    processor = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    features = [line for line in processor.splitlines() if line.startswith(("flags", "Features"))]
    sources = sorted(_SOURCES.glob("*.cpp"))
    library = _load("cpu", sources, _Compiler("c++", _CPU_FLAGS), features)
    return None if library is None else CpuKernels(library)


@functools.cache
def load_cuda_kernels(major: int, minor: int) -> Any | None:
    """Return the functions of *.cu for a GPU of that compute capability.

    Returns:
        None as above, or without a warning if there is no CUDA toolkit.
    """
    flags = [*_CUDA_FLAGS, f"-arch=sm_{major}{minor}"]
    toolkit = find_cuda_toolkit()
    compiler = _Compiler(None, flags)
    if toolkit is not None:
        compiler = _Compiler(str(toolkit.nvcc), flags, [f"-L{toolkit.home / 'lib64'}"])
    return _load("gpu", sorted(_SOURCES.glob("*.cu")), compiler, [])


def _load(name: str, sources: list[Path], compiler: _Compiler, features: list[str]) -> Any | None:
    digest = _digest(sources, [tvm_ffi.__version__, *compiler.flags, *features])
    try:
        with _LOCKS[name], _library_folder() as folder:
            library = folder / f"{name}-{digest}.so"
            if not is_own_file(library):
                library.unlink(missing_ok=True)
                if compiler.command is None:
                    return None
                _compile(sources, library, compiler.command, compiler)
            return tvm_ffi.load_module(str(library))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "the kernels for a %s cannot be built, slower ones are used: %s", name.upper(), reason
        )
        return None


@contextmanager
def _library_folder() -> Iterator[Path]:
    """The folder of compiled kernels, or one that is removed again if that is not our own."""
    kept = cache_folder() / "kernels"
    try:
        folder = make_own_folder(kept)
    except OSError as error:
        logger.warning("compiled kernels are not kept in %s: %s", kept, error)
        with tempfile.TemporaryDirectory(prefix="minisgl-kernels-") as scratch:
            yield Path(scratch)
    else:
        yield folder


def _digest(sources: list[Path], others: list[str]) -> str:
    """Identify a library by all that it is made of."""
    files = [*sources, *sorted(_SOURCES.glob("*.h")), *sorted(_SOURCES.glob("*.cuh"))]
    text = "\n".join([*(file.read_text() for file in files), *others])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compile(sources: list[Path], library: Path, command: str, compiler: _Compiler) -> None:
    """Compile under a name of this process, then rename: another process may be compiling too.

    OpenMP is compiled in but not linked, so that the threads are those of the runtime that torch
    brought along.
    """
    include_folders = (_SOURCES, libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    options = [*compiler.flags, *(f"-I{folder}" for folder in include_folders)]
    ffi_folder = Path(libinfo.find_libtvm_ffi()).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = {source: f"{folder}/{source.stem}.o" for source in sources}
        commands = [
            [command, *options, "-c", str(source), "-o", made] for source, made in objects.items()
        ]
        with ThreadPoolExecutor(len(sources)) as pool:
            list(pool.map(_run, commands))
        unfinished = Path(folder) / "kernels.so"
        link = ["-shared", *objects.values(), "-o", str(unfinished)]
        _run([command, *link, *compiler.link_flags, f"-L{ffi_folder}", "-ltvm_ffi"])
        unfinished.rename(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
