"""Lets one thread at a time use an `LLM`, in the process that made it."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from minisgl.errors import EngineFailed, InvalidRequest

_BUSY = "another thread uses this LLM; one at a time may, until its answers have ended"


class Claim:
    """The right to use an `LLM`. A thread has it from its first prompt to its last answer's end.

    Args:
        open_uids: of the prompts whose answers have not ended; the `LLM` changes them.

    Attributes:
        opening: to be held while the claim is taken and uids become open.
    """

    def __init__(self, open_uids: Collection[int]) -> None:
        self.opening = threading.Lock()
        self._open_uids = open_uids
        self._owner = threading.get_ident()
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

    def take(self) -> None:
        """Take the claim for this thread.

        Raises:
            InvalidRequest: another thread has it.
        """
        assert self.opening.locked()
        thread = threading.get_ident()
        if self._open_uids and self._owner != thread:
            raise InvalidRequest(_BUSY)
        self._owner = thread

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
