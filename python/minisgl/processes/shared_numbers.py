"""Numbers that several processes change, in files of a folder that they share.

A file lock makes each change atomic. The kernel releases it if its process dies.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl.errors import ConfigError

_BYTES = 8
_ERRORS_OF_A_FOLDER = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.ENOENT,
}


class SharedNumbers:
    """Arrays of floats by their names. One thread of a process may use it.

    Args:
        folder: of the files. Without one the numbers are this process's own.

    Raises:
        ConfigError: no file can be made in the folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock: int | None = None
        if folder is not None:
            with _failure_is_explained(folder):
                self._lock = _open(folder / "numbers.lock")

    def array(self, name: str, size: int) -> memoryview[float]:
        """An array of floats, zero at first, which every process shares that asks for this name.

        They are changed within `locked`, and what is read for a change is read there. Without a
        folder each call makes new ones.

        Raises:
            ConfigError: the disk is full. It cannot be later: a write would end the process by
                SIGBUS.
        """
        num_bytes = size * _BYTES
        if self._folder is None:
            return memoryview(bytearray(num_bytes)).cast("d")
        with _failure_is_explained(self._folder):
            descriptor = _open(self._folder / f"numbers.{name}")
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)  # keeps what others have written
                return memoryview(mmap.mmap(descriptor, num_bytes)).cast("d")
            finally:
                os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process changes a number until the end of the block."""
        if self._lock is None:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def _failure_is_explained(folder: Path) -> Iterator[None]:
    """
    Raises:
        ConfigError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        message = f"no file can be made in {folder}: {error.strerror}"
        if error.errno in _ERRORS_OF_A_FOLDER:
            message += "; set TMPDIR to a folder with room"
        raise ConfigError(message) from None
