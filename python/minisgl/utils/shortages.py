"""Errors that mean that the system is short of a resource, which may pass."""

from __future__ import annotations

import errno

_NUMBERS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error means that memory, file descriptors, processes or threads are short."""
    if isinstance(error, OSError):
        return error.errno in _NUMBERS
    return isinstance(error, MemoryError)
