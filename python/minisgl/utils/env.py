"""The environment, read in this one place."""

from __future__ import annotations

import os
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
