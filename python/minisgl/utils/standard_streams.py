"""Standard streams that were closed when the program was started."""

from __future__ import annotations

import os
import sys

_MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their descriptors


def open_closed_streams() -> None:
    """Let standard streams that are closed lead to the null device, here and in children.

    Otherwise a socket or a file gets the descriptor, and libraries and children write into it what
    is meant for stderr. Call it before anything is opened.
    """
    for descriptor, (name, mode) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)
            if null != descriptor:
                os.close(null)
            os.set_inheritable(descriptor, True)  # by children
            setattr(sys, name, os.fdopen(descriptor, mode))
