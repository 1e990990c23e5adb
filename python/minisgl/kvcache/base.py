"""The contract of a prefix cache.

Ownership: a page is at any time free, held by one request, or in the prefix cache. `insert` moves
pages from the caller into the cache, `evict`, `cut` and `drop` move them back, and no other method
moves a page. A lock keeps the pages of a prefix in the cache, which knows the requests that have
locked it. Keys and handles are structs, because each request needs several: a frozen dataclass
takes ten times as long to make. Next to read: `radix_cache.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set

import msgspec

from minisgl.core import IntArray


class PrefixKey(msgspec.Struct, frozen=True, eq=False):
    """A sequence of tokens in a namespace. Keys of two namespaces have no prefix in common.

    Attributes:
        namespace: any text; empty for requests that name none.
    """

    namespace: str
    tokens: IntArray


class BaseCacheHandle(msgspec.Struct, frozen=True, eq=False):
    """A prefix that the cache holds.

    Attributes:
        num_tokens: its length, a multiple of the page size.
    """

    num_tokens: int


class SharedPrefix(msgspec.Struct, frozen=True, eq=False):
    """A prefix that many requests have locked.

    Attributes:
        num_tokens: its length, a multiple of the page size.
        locked_by: their uids; valid until the next lock or unlock.
        above: the longest shared prefix with which this one begins; None if there is none.
    """

    num_tokens: int
    locked_by: Set[int]
    above: SharedPrefix | None


class InsertResult(msgspec.Struct, frozen=True):
    """The result of `insert`: which of the given pages the cache has taken.

    Attributes:
        handle: the inserted prefix.
        num_cached_tokens: leading tokens that the cache held before. If the caller has pages of
            its own for these, it keeps them. Its pages from there to the end of the handle are the
            cache's now.
    """

    handle: BaseCacheHandle
    num_cached_tokens: int


class BasePrefixCache(ABC):
    """Which pages hold the KV of which tokens. Counts in pages, compares namespaces and tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    @abstractmethod
    def match(self, key: PrefixKey, after: BaseCacheHandle | None = None) -> BaseCacheHandle:
        """Find the longest cached prefix, in whole pages. It counts as used now.

        The handle is valid until the next match, insert or evict, or as long as it is locked.

        Args:
            after: a locked prefix of the key, from which the search goes on.
        """

    @abstractmethod
    def pages(self, handle: BaseCacheHandle) -> IntArray:
        """The pages of a handle's prefix, in order."""

    @abstractmethod
    def insert(
        self, key: PrefixKey, pages: IntArray, after: BaseCacheHandle | None = None
    ) -> InsertResult:
        """Add the whole pages of a sequence.

        Args:
            pages: of all tokens of the key, or of those that follow `after`.
            after: a locked prefix of the key.
        """

    @abstractmethod
    def lock(self, handle: BaseCacheHandle, uid: int) -> None:
        """Protect a prefix from eviction.

        A uid may later lock a longer prefix that begins with this one, but no other.
        """

    @abstractmethod
    def unlock(self, handle: BaseCacheHandle, uid: int) -> None:
        """Undo the locks of a uid, given the longest prefix that it has locked."""

    @abstractmethod
    def locking_uid(self, handle: BaseCacheHandle) -> int | None:
        """The uid of any request that has locked a prefix; None if there is none or it is empty."""

    @abstractmethod
    def shared_prefixes(self) -> list[SharedPrefix]:
        """All prefixes that at least `FEWEST_IN_GROUP` requests have locked, in any order.

        Where the same requests have also locked a longer one, the shorter one is left out. Shorter
        ones arise wherever another cached prompt branches off.
        """

    @abstractmethod
    def evict(self, num_pages: int) -> IntArray:
        """Remove and return num_pages unlocked pages of any namespace, least recently used first.

        Raises:
            CapacityError: fewer are unlocked; nothing was evicted.
        """

    @abstractmethod
    def cut(self, handle: BaseCacheHandle, after: BaseCacheHandle) -> None:
        """Remove the end of a prefix. Its pages then belong to the caller.

        Args:
            handle: its end is not locked, and no longer prefix has been inserted.
            after: the beginning that is kept.
        """

    @abstractmethod
    def drop(self, handle: BaseCacheHandle) -> IntArray:
        """Remove the end of a prefix and return its pages.

        What is locked, or is the beginning of another cached prefix, is kept.
        """

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Unlocked pages."""

    @abstractmethod
    def check_integrity(self) -> IntArray:
        """Assert the cache's invariants; returns all pages that it holds."""
