"""The compiled kernels of a CPU: csrc/cpu.cpp, built once for this processor and kept in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import logging
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi import libinfo

from minisgl.utils.env import cache_folder

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "csrc" / "cpu.cpp"
_FLAGS = [
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
]


@functools.cache
def load_cpu_kernels() -> Any | None:
    """The compiled functions; None, with a warning, if they cannot be compiled here."""
    processor = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    features = [line for line in processor.splitlines() if line.startswith(("flags", "Features"))]
    identity = "\n".join([_SOURCE.read_text(), tvm_ffi.__version__, *_FLAGS, *features])
    library = cache_folder() / "kernels" / f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    try:
        if not library.exists():
            _compile(library)
        return tvm_ffi.load_module(str(library))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("the CPU's own kernels cannot be built, torch's slower ones are used: %s", reason)
        return None


def _compile(library: Path) -> None:
    """Under names of this process, then renamed: another one may be at the same.

    OpenMP is compiled in but not linked, so that the threads are those of the runtime that torch brought along.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        object_file, unfinished = Path(folder) / "cpu.o", Path(folder) / "cpu.so"
        include = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
        _run("c++", *_FLAGS, *include, "-c", str(_SOURCE), "-o", str(object_file))
        folder_of_ffi = Path(libinfo.find_libtvm_ffi()).parent
        _run("c++", "-shared", str(object_file), "-o", str(unfinished), f"-L{folder_of_ffi}", "-ltvm_ffi")
        unfinished.rename(library)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
