"""Logging: every module has `logging.getLogger(__name__)`; a process sets its name once.

INFO is the life of a process, DEBUG the life of a request. Neither tokens nor prompts are logged.
"""

from __future__ import annotations

import logging
import sys


def set_up_logging(process: str, level: str = "INFO") -> None:
    """Write this process's records to stderr under its name. Replaces an earlier call."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s [{process}] %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger("minisgl")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level)
