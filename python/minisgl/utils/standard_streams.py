"""Standard streams that were closed when the program started, or that cannot be written."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from minisgl.errors import OutputFailed

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their descriptors


def open_closed_streams() -> None:
    """Open closed standard streams on the null device, here and for children.

    Otherwise a socket or a file gets the descriptor, and libraries and children write to it instead
    of stderr. Call it before anything is opened.
    """
    for descriptor, (name, mode) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)
            if null != descriptor:
                os.close(null)
            os.set_inheritable(descriptor, True)  # by children
            setattr(sys, name, os.fdopen(descriptor, mode))


def write_out(text: str) -> None:
    """Write to stdout and flush. After an error, stdout is the null device.

    Raises:
        BrokenPipeError: the reader has gone.
        OutputFailed: stdout cannot be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with open(os.devnull, "w") as nowhere:  # else Python would flush stdout once more
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputFailed(f"stdout cannot be written: {error.strerror}") from None


class Parser(argparse.ArgumentParser):
    """Raises OutputFailed if help cannot be written; argparse's own parser ignores that."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
            return
        with contextlib.suppress(BrokenPipeError):
            write_out(message)
