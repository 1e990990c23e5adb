"""Finds CUDA's compiler: in a toolkit of this machine, or in packages that pip installed.

pip installs a toolkit as one folder, `nvidia/cu13`, whose libraries a linker does not find: they
are in `lib` instead of `lib64`, and their names end in versions. So the cache folder gets a folder
of links to it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import ConfigError
from minisgl.utils.env import cache_folder, cuda_home, nvcc_of_path
from minisgl.utils.ownership import make_own_folder

logger = logging.getLogger(__name__)

_DEFAULT_HOME = Path("/usr/local/cuda")
# What pip splits over packages: without one of these files nothing can be compiled.
_FILES_OF_PIP = (
    "bin/nvcc",
    "nvvm/bin/cicc",
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "lib/libcudart_static.a",
)


@dataclass(frozen=True, slots=True)
class CudaToolkit:
    """A compiler, with its headers and the libraries that it links.

    Attributes:
        home: has `bin/nvcc`, `include` and `lib64`, as CUDA_HOME does.
    """

    home: Path

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"


def find_cuda_toolkit() -> CudaToolkit | None:
    """Return the toolkit of CUDA_HOME, else that of pip, else that of PATH or the default folder.

    That of pip has torch's version of CUDA, because both require the same `cuda-toolkit`.

    Returns:
        None if there is none.
    """
    home = cuda_home()
    if home is not None:
        return CudaToolkit(home) if (home / "bin" / "nvcc").exists() else None
    for folder in _folders_of_pip():
        if all((folder / file).exists() for file in _FILES_OF_PIP):
            return _linked(folder)
    found = nvcc_of_path()
    candidates = [_DEFAULT_HOME] if found is None else [found.resolve().parents[1], _DEFAULT_HOME]
    for candidate in candidates:
        toolkit = CudaToolkit(candidate)
        if toolkit.nvcc.exists() and (candidate / "include" / "cuda_runtime.h").exists():
            return toolkit
    return None


def _folders_of_pip() -> list[Path]:
    """The folders of pip's packages for each version of CUDA, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec and spec.submodule_search_locations) or ()
    folders = [folder for location in locations for folder in Path(location).glob("cu[0-9]*")]
    return sorted(folders, key=lambda folder: folder.name, reverse=True)


def _linked(folder: Path) -> CudaToolkit | None:
    """The folder of links for pip's; None, with a warning, if it cannot be made."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    try:
        home = make_own_folder(cache_folder() / "cuda" / name)
        for part in ("bin", "include", "nvvm"):
            _link(home / part, folder / part)
        for library in (folder / "lib").glob("lib*"):
            plain_name = library.name.partition(".so")[0] + ".so"
            name = plain_name if ".so" in library.name else library.name
            _link(home / "lib64" / name, library)
        driver = _path_of_driver()
        if driver is not None:
            _link(home / "lib64" / "libcuda.so", driver)
    except (OSError, ConfigError) as error:
        logger.warning("the CUDA compiler of %s cannot be used: %s", folder, error)
        return None
    return CudaToolkit(home)


def _link(link: Path, target: Path) -> None:
    """Make a link or change it at once: other threads and processes may be making and using it."""
    link.parent.mkdir(mode=0o700, exist_ok=True)
    if link.is_symlink() and link.readlink() == target:
        return
    unfinished = link.with_name(f"{link.name}.{os.getpid()}-{threading.get_ident()}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(link)


def _path_of_driver() -> Path | None:
    """The library of the GPU's driver, which some systems install without the linker's name."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, path = line.rpartition(" ")
        if Path(path).name.startswith("libcuda.so"):
            return Path(path)
    return None
