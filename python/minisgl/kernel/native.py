"""Loads the libraries of csrc/, which are compiled once and kept in the cache folder (`builds`).

If other users can write that folder, each process compiles its own libraries.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm_ffi

from minisgl.builds import Library, cpu_library, cuda_library, library_folder
from minisgl.errors import ConfigError
from minisgl.kernel.cpu_graph import CpuKernels
from minisgl.processes.private_folder import temporary_folder
from minisgl.utils.once import made_once

logger = logging.getLogger(__name__)


@made_once
def load_cpu_kernels() -> CpuKernels | None:
    """Return the functions of *.cpp; None, with a warning, if they cannot be compiled here."""
    library = _load("CPU", cpu_library())
    return None if library is None else CpuKernels(library)


@made_once
def load_cuda_kernels(major: int, minor: int) -> Any | None:
    """Return the functions of *.cu for a GPU of that compute capability.

    Returns:
        None as `load_cpu_kernels`, but without a warning if none are cached and there is no
        toolkit.
    """
    return _load("GPU", cuda_library((major, minor)))


@functools.cache
def can_load_cuda_kernels(major: int, minor: int) -> bool:
    """Whether `load_cuda_kernels` has a compiler or a cached library. It waits for neither."""
    library = cuda_library((major, minor))
    try:
        return library.compiler is not None or library.is_in(library_folder())
    except OSError:
        return False


def _load(processor: str, library: Library) -> Any | None:
    try:
        with _library_folder() as folder:
            if library.compiler is None and not library.is_in(folder):
                return None
            return tvm_ffi.load_module(str(library.make_in(folder)))
    except (OSError, RuntimeError, ConfigError) as error:
        logger.warning(
            "the kernels for a %s cannot be built, slower ones are used: %s", processor, error
        )
        return None


@contextmanager
def _library_folder() -> Iterator[Path]:
    """The folder of compiled kernels, or a temporary one if other users can write there."""
    try:
        folder = library_folder()
    except OSError as error:
        logger.warning("compiled kernels are not kept: %s", error)
        with temporary_folder() as scratch:
            yield scratch
    else:
        yield folder
