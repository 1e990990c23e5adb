"""Threads that make the masks of several answers at once, and the memory that they take.

Which automaton grew meanwhile is not known. So once the threads have taken some memory, masks are
made one after the other for some steps. The grammars that grow in these steps are also charged for
what the threads took before.
"""

# Dimensions: W words of 32 bits, X a selection out of another dimension: requests with a grammar.

from __future__ import annotations

import llguidance.numpy
from llguidance import LLExecutor, LLMatcher

from minisgl.core import IntArray
from minisgl.utils.heap import bytes_touched_by, process_bytes_touched, thread_ids

_NUM_WATCHED_STEPS = 16
_UNWATCHED_BYTES = 2**18  # that the threads may take before they are watched
_SHARE = 2**4  # times what a grammar has grown by, at most, are charged of what is unknown


class MaskThreads:
    """The threads, and the memory that they took and that no grammar is charged for yet.

    All but `fill` is called by the thread that steps, so that no number is changed by two.

    Args:
        num_threads: None lets llguidance choose.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        before = thread_ids()
        self._executor = LLExecutor(num_threads)
        self._threads = thread_ids() - before
        self._num_watched_steps = 0
        self._process_bytes = process_bytes_touched()
        self._bytes = bytes_touched_by(self._threads)
        self._unknown_bytes = 0

    def begin_step(self) -> bool:
        """Count a step; returns whether the caller makes its masks itself, one after the other."""
        if self._num_watched_steps:
            self._num_watched_steps -= 1
            return True
        return False

    def fill(self, matchers: list[tuple[LLMatcher, int]], masks_XW: IntArray) -> None:
        """Make masks in parallel, without Python's lock. Any thread may call it, one at a time."""
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, masks_XW)

    def measure(self) -> None:
        """Account for what the threads have taken; to be called when masks have been made."""
        # The process has other threads, but all of its memory is known in a microsecond.
        process_bytes = process_bytes_touched()
        if process_bytes - self._process_bytes < _UNWATCHED_BYTES:
            return
        self._process_bytes = process_bytes
        num_bytes = bytes_touched_by(self._threads)
        # There may be less: a thread of other code, which ran beside them, has ended since.
        self._unknown_bytes += max(0, num_bytes - self._bytes)
        self._bytes = num_bytes
        if self._unknown_bytes >= _UNWATCHED_BYTES:
            self._num_watched_steps = _NUM_WATCHED_STEPS

    def take_unknown(self, num_bytes: int) -> int:
        """Charge a grammar that has grown by `num_bytes` with a part of the unknown memory.

        Returns:
            the part, in bytes.
        """
        share = min(self._unknown_bytes, num_bytes * _SHARE)
        self._unknown_bytes -= share
        return share
