"""The prefix cache that keeps nothing: `--cache naive`."""

from __future__ import annotations

import numpy as np

from minisgl.core import IntArray
from minisgl.errors import CapacityError
from minisgl.kvcache.base import (
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    PrefixKey,
    SharedPrefix,
)

_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
_EMPTY_PREFIX = BaseCacheHandle(0)


class NaivePrefixCache(BasePrefixCache):
    """Holds no page: every match is empty and every insert leaves the pages with the caller."""

    def match(
        self,
        key: PrefixKey,  # noqa: ARG002 - it would find nothing
        after: BaseCacheHandle | None = None,  # noqa: ARG002
    ) -> BaseCacheHandle:
        return _EMPTY_PREFIX

    def pages(self, handle: BaseCacheHandle) -> IntArray:  # noqa: ARG002 - all are empty
        return _NO_PAGES

    def insert(
        self,
        key: PrefixKey,  # noqa: ARG002 - keeps none
        pages: IntArray,  # noqa: ARG002
        after: BaseCacheHandle | None = None,  # noqa: ARG002
    ) -> InsertResult:
        return InsertResult(_EMPTY_PREFIX, 0)

    def lock(self, handle: BaseCacheHandle, uid: int) -> None:
        pass

    def unlock(self, handle: BaseCacheHandle, uid: int) -> None:
        pass

    def locking_uid(self, handle: BaseCacheHandle) -> int | None:  # noqa: ARG002 - all are empty
        return None

    def shared_prefixes(self) -> list[SharedPrefix]:
        return []

    def evict(self, num_pages: int) -> IntArray:
        if num_pages > 0:
            raise CapacityError(num_pages, 0)
        return _NO_PAGES

    def cut(self, handle: BaseCacheHandle, after: BaseCacheHandle) -> None:
        pass

    def drop(self, handle: BaseCacheHandle) -> IntArray:  # noqa: ARG002 - all are empty
        return _NO_PAGES

    @property
    def num_evictable(self) -> int:
        return 0

    def check_integrity(self) -> IntArray:
        return _NO_PAGES
