"""Rows of the page table and the token pool: one row for each admitted request.

Owns the list of free rows, and what the host has written to rows since the last plan. The tables
themselves are on the device. A row only grows while its request lives. It is reused only after the
last step that refers to it has finished, which the scheduler ensures.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from minisgl.core import IntArray, RowCopy, TableWrites

_Write = tuple[int, IntArray]  # flat index of the first value, values


class TableManager:
    """Hands out rows and writes to them.

    Args:
        num_pages, num_tokens: of a row.
    """

    def __init__(self, num_rows: int, num_pages: int, num_tokens: int) -> None:
        self._num_rows = num_rows
        self._num_pages = num_pages
        self._num_tokens = num_tokens
        self._free = list(range(num_rows))[::-1]
        self._pages: dict[int, list[_Write]] = {}
        self._tokens: dict[int, list[_Write]] = {}
        self._copies: list[RowCopy] = []
        # What was drained last, without copies, until it is committed.
        self._drained_pages: dict[int, list[_Write]] = {}
        self._drained_tokens: dict[int, list[_Write]] = {}

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def allocate(self) -> int:
        return self._free.pop()

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Write the first tokens of a row in use, and their pages, to a row without any."""
        self._copies.append(RowCopy(source, target, num_tokens))

    def write_tokens(self, row: int, start: int, tokens: IntArray) -> None:
        """Write tokens that the host knows to the positions from start on."""
        self._tokens.setdefault(row, []).append((row * self._num_tokens + start, tokens))

    def write_pages(self, row: int, first_page: int, pages: IntArray) -> None:
        """Write pages of a row from its first_page-th on."""
        self._pages.setdefault(row, []).append((row * self._num_pages + first_page, pages))

    def release(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)
        self._pages.pop(row, None)
        self._tokens.pop(row, None)
        # A copy to this row is drained by then: a request has a slice in the plan that admits it.

    def drain_writes(self) -> TableWrites:
        """Remove and return all that was written since the last call."""
        writes = TableWrites(
            *_flatten(self._pages.values()),
            *_flatten(self._tokens.values()),
            tuple(self._copies),
        )
        self._drained_pages, self._pages = self._pages, {}
        self._drained_tokens, self._tokens = self._tokens, {}
        self._copies = []
        return writes

    def commit(self) -> None:
        """Forget what was drained last: a launched step writes it."""
        self._drained_pages = {}
        self._drained_tokens = {}

    def rollback(self) -> None:
        """Put back what was drained last, because its step was not launched.

        To be called before anything else is written. Copies are not kept: rows with one were
        admitted for that step, and are released.
        """
        assert not self._pages
        assert not self._tokens
        self._pages = self._drained_pages
        self._tokens = self._drained_tokens
        self._drained_pages = {}
        self._drained_tokens = {}

    def check_integrity(self, rows_in_use: list[int]) -> None:
        assert sorted(rows_in_use + self._free) == list(range(self._num_rows))


def _flatten(writes_of_rows: Iterable[list[_Write]]) -> tuple[IntArray, IntArray]:
    """Indices and values of all writes, one after the other."""
    pairs = [write for writes in writes_of_rows for write in writes]
    if not pairs:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    index = np.concatenate(
        [np.arange(first, first + len(values), dtype=np.int32) for first, values in pairs]
    )
    return index, np.concatenate([values for _, values in pairs])
