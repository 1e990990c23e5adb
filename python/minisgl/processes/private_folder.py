"""Temporary folders, as of a server's sockets, that do not outlive their process for long.

A process that is killed cannot remove its folder, so the next one does. A lock in the folder shows
whether its process lives: the kernel releases the lock when the process ends, for whatever reason.
A process id would not do, since ids are reused.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

import zmq

from minisgl.errors import ConfigError

_PREFIX = "minisgl-"
_LOCK = "lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a `temporary_folder` for sockets; remove it at the end.

    Raises:
        ConfigError: no folder can be made, or the path is too long for the name of a socket.
    """
    with temporary_folder() as folder:
        if len(os.fsencode(folder)) + len("/detokenizer.0000.0000") > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"the temporary folder {folder.parent} is too long for a socket name; set TMPDIR"
            )
        yield folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter (0700); remove it at the end.

    Folders that killed processes of this user have left are removed before.

    Raises:
        ConfigError: there is no folder for temporary files, or none can be made in it.
    """
    try:
        parent = Path(gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}; set TMPDIR to a folder with room") from None
    _remove_stale_folders(parent)
    folder = parent / f"{_PREFIX}{secrets.token_hex(6)}"
    try:
        with ExitStack() as stack:
            try:
                folder.mkdir(mode=0o700)  # within: a signal may come as soon as it is made
                stack.enter_context(_locked(folder))
            except OSError as error:
                message = f"no folder can be made in {parent}: {error.strerror}; see TMPDIR"
                raise ConfigError(message) from None
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Mark a folder as one whose process lives.

    The file gets its name when it is locked, so that a new folder is never taken for a stale one.
    """
    unnamed = folder / f"{_LOCK}-new"
    with unnamed.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(folder / _LOCK)
        yield


def _remove_stale_folders(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is locked, another process removes it, or it is none of ours
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    """Remove a folder with a lock that no process holds.

    Everything goes through descriptors of what was checked. No link is followed, and nothing else
    is removed if the path is exchanged meanwhile.

    Raises:
        OSError: the folder is not stale, not this user's, or cannot be removed.
    """
    with ExitStack() as stack:
        flags = os.O_RDONLY | os.O_NOFOLLOW
        folder = os.open(path, flags | os.O_DIRECTORY)
        stack.callback(os.close, folder)
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        lock = os.open(_LOCK, flags, dir_fd=folder)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in os.listdir(folder):
            if name != _LOCK:
                _remove(name, folder)
        os.unlink(_LOCK, dir_fd=folder)  # last: what fails is tried again by the next process
    path.rmdir()


def _remove(name: str, folder: int) -> None:
    """Remove what has this name in an open folder."""
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
