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
        num_processes: that share the folder.

    Raises:
        ConfigError: no file can be made in the folder.
    """

    def __init__(self, folder: Path | None = None, num_processes: int = 1) -> None:
        self._folder = folder
        self._num_processes = num_processes
        self._lock: int | None = None
        if folder is not None:
            with _failure_is_explained(folder):
                self._lock = _open(folder / "numbers.lock")

    def array(self, name: str, size: int) -> memoryview[float]:
        """An array of floats, zero at first, which every process shares that asks for this name.

        They are changed within `locked`, and what is read for a change is read there. Without a
        folder each call makes new ones. A process asks for a name once, and not within `locked`:
        when all processes have an array, its file is removed.

        Raises:
            ConfigError: the disk is full. It cannot be later: a write would end the process by
                SIGBUS.
        """
        if self._folder is None:
            return memoryview(bytearray(size * _BYTES)).cast("d")
        path = self._folder / f"numbers.{name}"
        with _failure_is_explained(self._folder):
            numbers = _map(path, size + 1)
        with self.locked():
            numbers[size] += 1  # processes that have it
            if numbers[size] == self._num_processes:
                path.unlink()
        return numbers[:size]

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


def _map(path: Path, size: int) -> memoryview[float]:
    """The floats of a file, which is made if there is none."""
    descriptor = _open(path)
    try:
        os.posix_fallocate(descriptor, 0, size * _BYTES)  # keeps what others have written
        return memoryview(mmap.mmap(descriptor, size * _BYTES)).cast("d")
    finally:
        os.close(descriptor)


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
