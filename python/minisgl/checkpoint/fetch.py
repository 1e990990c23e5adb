"""From what the user calls a model to a local folder in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from minisgl.checkpoint.default_model import DEFAULT_MODEL, unpack_default_model
from minisgl.errors import CheckpointError, ConfigError
from minisgl.utils.env import cache_folder

logger = logging.getLogger(__name__)

_WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def fetch_model(model: str | None, source: str = "huggingface") -> Path:
    """Find or fetch a model.

    Args:
        model: a folder, a .gguf file, a hub id, or None for the default model.
        source: the hub to ask for an id.

    Raises:
        CheckpointError: it is nowhere, or damaged.
        ConfigError: the hub's library is not installed.
    """
    if model is None:
        return _made_once(cache_folder() / "models" / DEFAULT_MODEL, unpack_default_model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _unpacked_gguf(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{model} is neither a folder, nor a .gguf file, nor a hub id")
    return _from_hub(model, source)


def model_name(model: str | None) -> str:
    """What a model is called in the API if the user says nothing else."""
    return DEFAULT_MODEL if model is None else model.rstrip("/")


def _unpacked_gguf(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    from minisgl.checkpoint.gguf import (
        unpack,
    )  # here: its libraries take a while, which other models need not wait for

    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return _made_once(cache_folder() / "gguf" / name, lambda folder: unpack(path, folder))


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made in a scratch folder beside it and renamed when complete: never seen half made."""
    if folder.exists():
        return folder
    logger.info("preparing %s", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        make(scratch)
        os.rename(scratch, folder)
    except OSError:
        if not folder.exists():  # another process was faster otherwise
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _from_hub(model: str, source: str) -> Path:
    try:
        if source == "modelscope":
            from modelscope import snapshot_download
        else:
            from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            "--model-source modelscope needs: pip install 'minisgl[modelscope]'"
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES))
    except Exception as error:  # each library has its own tree, down to plain OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{model!r} cannot be fetched from {source}: {reason}") from error
