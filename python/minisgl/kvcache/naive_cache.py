"""The prefix cache that remembers nothing: `--cache naive`."""

from __future__ import annotations

import numpy as np

from minisgl.core import IntArray
from minisgl.errors import CapacityError
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache, InsertResult

_EMPTY: IntArray = np.empty(0, dtype=np.int32)
_NOTHING = BaseCacheHandle(0)


class NaivePrefixCache(BasePrefixCache):
    """Holds no page: every match is empty and every insert leaves the pages with the caller."""

    shares = False

    def match(self, tokens: IntArray) -> BaseCacheHandle:  # noqa: ARG002
        return _NOTHING

    def pages(self, handle: BaseCacheHandle) -> IntArray:  # noqa: ARG002
        return _EMPTY

    def insert(self, tokens: IntArray, pages: IntArray) -> InsertResult:  # noqa: ARG002
        return InsertResult(_NOTHING, 0)

    def lock(self, handle: BaseCacheHandle) -> None:
        pass

    def unlock(self, handle: BaseCacheHandle) -> None:
        pass

    def evict(self, num_pages: int) -> IntArray:
        if num_pages > 0:
            raise CapacityError(num_pages, 0)
        return _EMPTY

    @property
    def num_evictable(self) -> int:
        return 0

    @property
    def num_pages(self) -> int:
        return 0

    def check_integrity(self) -> IntArray:
        return _EMPTY
