"""Size limits of the small files of a model's folder, which are checked before a file is read."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from minisgl.errors import CheckpointError

GGUF_NAME = "model.gguf"  # in a folder that was made of it
MAX_CONFIG_BYTES = 16 << 20  # lists of layers that are not quantized are long
MAX_INDEX_BYTES = 64 << 20  # a tensor has a line; large mixtures of experts have 200,000
MAX_TOKENIZER_BYTES = 128 << 20  # a vocabulary of 262,144 with its merges has 33 MB
_MAX_MESSAGE = 300  # characters of a library's error
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def check_size(path: Path, max_bytes: int) -> None:
    """
    Raises:
        CheckpointError: there is no such plain file, or it is larger.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} cannot be read: it is no plain file")
    if status.st_size > max_bytes:
        raise CheckpointError(f"{path} has {status.st_size} bytes, at most {max_bytes} are read")


def check_tokenizer_files(folder: Path) -> None:
    """Check the size of each file that a tokenizer may be read from.

    Raises:
        CheckpointError: a file is larger than any tokenizer's.
    """
    for pattern in _TOKENIZER_FILES:
        for path in folder.glob(pattern):
            check_size(path, MAX_TOKENIZER_BYTES)


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is not an Exception in Python."""
    return type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """An error's message as one line of limited length, or the error's name if it has none."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line)
    if len(text) > _MAX_MESSAGE:
        text = text[:_MAX_MESSAGE] + "..."
    return text or type(error).__name__


def read_text(path: Path, max_bytes: int) -> str:
    """Read a file of UTF-8.

    Raises:
        CheckpointError: the file is missing, too large, or holds something else.
    """
    check_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: the file is missing, too large, or holds something else.
    """
    text = read_text(path, max_bytes)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers can be too long, too
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content
