"""Logging: every module has `logging.getLogger(__name__)`; a process says once who it is.

INFO is the life of a process, DEBUG the life of a request; nothing is logged per token, and never a prompt.
"""

from __future__ import annotations

import logging
import sys


def set_up_logging(process: str, level: str = "INFO") -> None:
    """Send this process's records to stderr under its name. Replaces an earlier call."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s [{process}] %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger("minisgl")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level)
