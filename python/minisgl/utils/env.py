"""The environment, read and written in this one place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cache_folder() -> Path:
    """Where downloaded and converted models are kept: MINISGL_CACHE, or minisgl in the user's cache."""
    own = os.environ.get("MINISGL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minisgl"


def overlap_disabled() -> bool:
    """MINISGL_DISABLE_OVERLAP_SCHEDULING=1, the alias of `--no-overlap`."""
    return os.environ.get("MINISGL_DISABLE_OVERLAP_SCHEDULING", "0").lower() in ("1", "true", "yes")


def api_keys() -> str | None:
    """MINISGL_API_KEY: keys as `--api-key` takes them, which the process list does not show."""
    return os.environ.get("MINISGL_API_KEY")


def nvcc() -> str:
    """CUDA's compiler: that of CUDA_HOME, else that of the PATH, else where it is installed by default."""
    home = os.environ.get("CUDA_HOME")
    folders = [
        *([f"{home}/bin"] if home else []),
        os.environ.get("PATH", os.defpath),
        "/usr/local/cuda/bin",
    ]
    return shutil.which("nvcc", path=os.pathsep.join(folders)) or "nvcc"


def silence_transformers() -> None:
    """TRANSFORMERS_NO_ADVISORY_WARNINGS: it would advise to install torch where tokenizers do without."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
