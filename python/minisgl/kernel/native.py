"""The compiled kernels of csrc/: built once for this processor and kept in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import logging
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi import libinfo

from minisgl.utils.env import cache_folder, nvcc

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_CPU_FLAGS = [
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
]
_CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC"]


@functools.cache
def load_cpu_kernels() -> Any | None:
    """The compiled functions; None, with a warning, if they cannot be compiled here."""
    processor = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    features = [line for line in processor.splitlines() if line.startswith(("flags", "Features"))]
    return _load("cpu", [_SOURCES / "cpu.cpp"], "c++", _CPU_FLAGS, features)


@functools.cache
def load_cuda_kernels(major: int, minor: int) -> Any | None:
    """The same for a GPU of that compute capability."""
    sources = sorted(_SOURCES.glob("*.cu"))
    return _load("gpu", sources, nvcc(), [*_CUDA_FLAGS, f"-arch=sm_{major}{minor}"], [])


def _load(
    name: str, sources: list[Path], compiler: str, flags: list[str], features: list[str]
) -> Any | None:
    read = [file.read_text() for file in (*sources, *sorted(_SOURCES.glob("*.cuh")))]
    digest = hashlib.sha256(
        "\n".join([*read, tvm_ffi.__version__, *flags, *features]).encode()
    ).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"{name}-{digest}.so"
    try:
        if not library.exists():
            _compile(sources, library, compiler, flags)
        return tvm_ffi.load_module(str(library))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "the kernels for a %s cannot be built, slower ones are used: %s", name.upper(), reason
        )
        return None


def _compile(sources: list[Path], library: Path, compiler: str, flags: list[str]) -> None:
    """Under names of this process, then renamed: another one may be at the same.

    OpenMP is compiled in but not linked, so that the threads are those of the runtime that torch brought along.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        unfinished = Path(folder) / "kernels.so"
        objects = {source: Path(folder) / f"{source.stem}.o" for source in sources}
        include = [
            f"-I{path}"
            for path in (_SOURCES, libinfo.find_include_path(), libinfo.find_dlpack_include_path())
        ]
        with ThreadPoolExecutor(len(sources)) as pool:
            commands = [
                (compiler, *flags, *include, "-c", str(it), "-o", str(made))
                for it, made in objects.items()
            ]
            list(pool.map(lambda command: _run(*command), commands))
        folder_of_ffi = Path(libinfo.find_libtvm_ffi()).parent
        _run(
            compiler,
            "-shared",
            *map(str, objects.values()),
            "-o",
            str(unfinished),
            f"-L{folder_of_ffi}",
            "-ltvm_ffi",
        )
        unfinished.rename(library)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
