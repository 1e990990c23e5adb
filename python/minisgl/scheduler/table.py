"""Rows of the page table and the token pool: one row for each admitted request.

Owns which rows are free. A row's pages are only ever appended to while its request lives; the row is reused
only after the last batch that refers to it has finished (the scheduler sees to that).
"""

# Dimension key: R table rows, L positions, P pages.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import IntArray


class TableManager:
    """Hands out rows and writes to them."""

    def __init__(self, page_table_RP: Tensor, token_pool_RL: Tensor) -> None:
        self._page_table_RP = page_table_RP
        self._token_pool_RL = token_pool_RL
        self._num_rows = page_table_RP.shape[0]
        self._free = list(range(self._num_rows))[::-1]

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def allocate(self, tokens: IntArray) -> int:
        """Take a row and write the request's known tokens to it."""
        row = self._free.pop()
        self._token_pool_RL[row, : len(tokens)] = torch.from_numpy(tokens)
        return row

    def append_pages(self, row: int, num_held: int, pages: IntArray) -> None:
        """Write pages behind the num_held pages that the row has."""
        self._page_table_RP[row, num_held : num_held + len(pages)] = torch.from_numpy(pages)

    def release(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)

    def check_integrity(self, rows_in_use: list[int]) -> None:
        assert sorted(rows_in_use + self._free) == list(range(self._num_rows))
