"""Where a process keeps Python's bytecode, if Python would keep it nowhere.

Python compiles each source that is imported, keeps the bytecode beside it, and reads that the next
time. In many containers it must not (PYTHONDONTWRITEBYTECODE) or cannot write there, and the
packages were installed without bytecode. Then every process compiles torch again, which takes two
of the nine seconds of a start. Such a process keeps bytecode in the folder of compiled kernels.

Python uses bytecode if its source has the recorded size and modification time. Images may give all
files the same time, and the cache folder may outlive an image. So each installation has a folder of
its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from minisgl.errors import ConfigError
from minisgl.utils.env import cache_folder
from minisgl.utils.ownership import make_own_folder


def keep_bytecode() -> None:
    """Let this process keep its bytecode in the cache folder, if Python would keep it nowhere.

    To be called before anything large is imported. A folder of PYTHONPYCACHEPREFIX is not changed.
    """
    source = _source_of_torch()
    if sys.pycache_prefix or source is None or _is_kept(source):
        return
    try:
        folder = make_own_folder(cache_folder() / "bytecode" / _installation(source))
    except (ConfigError, OSError):  # others could write there, and what is read there is run
        return
    sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


def _source_of_torch() -> Path | None:
    """A source of torch, which takes longest to compile; None if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _is_kept(source: Path) -> bool:
    """Whether a source is compiled already, or will be kept by Python itself."""
    if Path(importlib.util.cache_from_source(str(source))).exists():
        return True
    return not sys.dont_write_bytecode and os.access(source.parent, os.W_OK)


def _installation(source_of_torch: Path) -> str:
    """A name that changes when a package is installed again, or an image is unpacked.

    A program cannot set a file's change time (ctime), unlike its modification time (mtime).
    """
    packages = sorted(path.name for path in source_of_torch.parents[1].glob("*.dist-info"))
    facts = [*packages]
    for file in (source_of_torch, Path(__file__)):
        status = file.stat()
        facts += [str(file), str(status.st_ino), str(status.st_ctime_ns)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
