"""Who may use an `LLM` now: one thread at a time, of the process that made it."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from minisgl.errors import EngineFailed, InvalidRequest

_BUSY = "another thread uses this LLM; one at a time may, until its answers have ended"


class Claim:
    """A thread has it from its first prompt until all its answers have ended.

    Args:
        open_uids: of the prompts whose answers have not ended; the `LLM` changes them.
    """

    def __init__(self, open_uids: Collection[int]) -> None:
        self._open_uids = open_uids
        self._owner = threading.get_ident()
        self._submitting = threading.Lock()
        self._stepping = threading.Lock()
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process is no fork: threads and other processes are not there in one."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Check that this process is no fork.

        Raises:
            EngineFailed: it is one.
        """
        if not self.is_of_this_process:
            raise EngineFailed(f"this LLM belongs to the process {self._pid}, this is a fork of it")

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Take the claim for this thread; no other one takes it until the end of the block.

        Raises:
            InvalidRequest: another thread has it.
        """
        with self._submitting:
            if self._open_uids and self._owner != threading.get_ident():
                raise InvalidRequest(_BUSY)
            self._owner = threading.get_ident()
            yield

    @property
    def is_stepping(self) -> bool:
        return self._stepping.locked()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """No other step begins until the end of the block.

        Raises:
            InvalidRequest: a step is being made.
        """
        if not self._stepping.acquire(blocking=False):
            raise InvalidRequest(_BUSY)
        try:
            yield
        finally:
            self._stepping.release()
