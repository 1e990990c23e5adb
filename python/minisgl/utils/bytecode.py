"""Where a process keeps what Python compiles, if Python would keep it nowhere.

Python compiles each source that is imported, keeps the result beside it, and reads that the next
time. In many containers it must not (PYTHONDONTWRITEBYTECODE) or cannot write there, and whoever
installed the packages has compiled nothing either. Then every process compiles torch anew, which is
two of the nine seconds of a start. Such a process keeps it where compiled kernels are kept, too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from minisgl.errors import ConfigError
from minisgl.utils.env import cache_folder
from minisgl.utils.ownership import make_own_folder


def keep_bytecode() -> None:
    """Let this process keep and read compiled sources in the cache folder, if they are nowhere.

    To be called before anything large is imported. A folder that PYTHONPYCACHEPREFIX names stays.
    """
    if sys.pycache_prefix or _torch_is_kept():
        return
    try:
        folder = make_own_folder(cache_folder() / "bytecode")
    except (ConfigError, OSError):  # others could write there, and what is read there is run
        return
    sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


def _torch_is_kept() -> bool:
    """Whether torch, which takes longest, is compiled already, or will be kept by Python itself."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True  # nothing takes long
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
