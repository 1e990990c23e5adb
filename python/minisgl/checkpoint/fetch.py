"""Resolves a model's name, file or folder to a local folder in Hugging Face's layout."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from minisgl.checkpoint.default_model import DEFAULT_MODEL, download_default_model
from minisgl.errors import CheckpointError, ConfigError
from minisgl.utils.env import cache_folder
from minisgl.utils.logger import adopt_loggers

logger = logging.getLogger(__name__)

# Versions of the written folders. They go up when the format changes: older folders are not used.
_CONVERSION = 7  # of GGUF files
_DEFAULT_CONVERSION = 3  # of the default model, which is then fetched again
_WANTED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def fetch_model(model: str | None, source: str = "huggingface") -> Path:
    """Find a model's folder; download or convert the model if it has none.

    Args:
        model: a folder, a .gguf file, a hub id, or None for the default model.
        source: the hub of an id.

    Raises:
        CheckpointError: the model cannot be found, or is damaged.
        ConfigError: the hub's library is not installed, or the cache folder cannot be written.
    """
    if model is None:
        folder = cache_folder() / "models" / f"{DEFAULT_MODEL}-{_DEFAULT_CONVERSION}"
        return _create_once(folder, download_default_model)
    if not model:
        raise CheckpointError("--model is empty: name a folder, a .gguf file, or a hub id")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        is_there = path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, no such user
        raise CheckpointError(f"{model!r} cannot be a model's path: {error}") from None
    if path.suffix == ".gguf":
        return _folder_of_gguf(path)
    if not is_there and (model.startswith((".", "/", "~")) or model.endswith("/")):
        raise CheckpointError(f"the model's folder {model} does not exist")
    if is_there or model.count("/") > 1:
        raise CheckpointError(f"{model} is neither a folder, nor a .gguf file, nor a hub id")
    return _from_hub(model, source)


def model_name(model: str | None) -> str:
    """The name of a model in the API, if no option sets another."""
    return DEFAULT_MODEL if model is None else model.rstrip("/")


def _folder_of_gguf(path: Path) -> Path:
    """Convert a GGUF file's metadata, unless an unchanged file has been converted before."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    # Imported here: its libraries take a while, and only GGUF files need them.
    from minisgl.checkpoint.gguf_folder import write_hf_folder

    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{_CONVERSION}"
    name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return _create_once(
        cache_folder() / "gguf" / name, lambda scratch: write_hf_folder(path, scratch)
    )


def _create_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return the folder; create it if it is missing.

    A scratch folder beside it is filled and then renamed, so that no process sees an incomplete
    folder.

    Raises:
        ConfigError: the cache folder cannot be written, or is full.
    """
    try:
        if folder.exists():
            return folder
        logger.info("preparing %s", folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(mkdtemp(dir=folder.parent, prefix=".making-"))
    except OSError as error:
        raise ConfigError(
            f"{folder.parent} cannot be written: {error.strerror}; see MINISGL_CACHE"
        ) from None
    try:
        fill(scratch)
        os.rename(scratch, folder)
    except OSError as error:
        if not folder.exists():  # else another process has created it meanwhile
            raise ConfigError(
                f"{folder} cannot be written: {error.strerror or error}; see MINISGL_CACHE"
            ) from error
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
    adopt_loggers("huggingface_hub", "modelscope")
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES))
    except Exception as error:  # each library has its own tree, down to plain OSError
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise CheckpointError(
            f"{model!r} is no folder here, and cannot be fetched from {source}: {reason}"
        ) from error
