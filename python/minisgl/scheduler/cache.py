"""Pages: each is either free, or held by a request, or in the prefix cache.

The page-table row of a request, and who owns the pages:

    row      │ prefix │ own     │
    owner    │ cache  │ request │

The row only grows. The prefix is cached, and locked by the request. `publish` moves pages from the
request's own to the prefix. Where another request has published pages for the same tokens before,
the request keeps its own until it ends or is retracted: launched steps may read them.

Rows that have locked the same node of the prefix tree begin with the same pages. So the beginning
of a new row is copied, on the device, from another such row. And which rows share a prefix is known
without comparing them.

Owns the free pages, the prefix cache, and the record of what each request holds. Only
`_num_pages_for` rounds up. Next to read: `kvcache/base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.core import IntArray, Req
from minisgl.kvcache import (
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    PrefixKey,
    SharedPrefix,
)
from minisgl.scheduler.table import TableManager


@dataclass(slots=True)
class _Holding:
    """The row and pages of one admitted request.

    Attributes:
        prefix: the locked prefix, with whose pages the row begins.
        own: the other pages of the row, in order.
        num_slots: tokens that all pages of the row can hold.
    """

    row: int
    prefix: BaseCacheHandle
    own: list[int] = field(default_factory=list)
    num_slots: int = 0


class CacheManager:
    """Gives requests their rows and pages, and takes them back.

    Evicts cached prefixes if no page is free.
    """

    def __init__(self, num_pages: int, prefix_cache: BasePrefixCache, table: TableManager) -> None:
        self.page_size = prefix_cache.page_size
        self.num_pages = num_pages
        self._prefix_cache = prefix_cache
        self._table = table
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack of _num_free pages
        self._num_free = num_pages
        self._held: dict[int, _Holding] = {}

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self._num_free + self._prefix_cache.num_evictable

    def _num_pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of this length needs; the last one may be filled in part."""
        return -(-num_tokens // self.page_size)

    def try_admit(self, req: Req, reserve: int) -> bool:
        """Give a request a row, its cached prefix, and pages for all its tokens.

        Args:
            reserve: pages that must be left over for other requests, running or partly computed.

        Returns:
            False, and nothing has changed, if the pages do not suffice.
        """
        prefix = self._match(req)
        # Before the lock, after which it could be this request itself.
        neighbour = self._prefix_cache.locking_uid(prefix)
        self._prefix_cache.lock(prefix, req.uid)
        wanted = self._num_pages_for(req.num_tokens) - self._num_prefix_pages(prefix)
        if wanted + reserve > self.num_available:
            self._prefix_cache.unlock(prefix, req.uid)
            return False
        req.row = self._table.allocate()
        self._write_row(req, prefix, neighbour)
        self._held[req.uid] = _Holding(req.row, prefix, num_slots=prefix.num_tokens)
        self._append_pages(req, wanted)
        req.num_computed = prefix.num_tokens
        return True

    def num_uncached(self, req: Req) -> int:
        """Tokens that a request would compute if admitted now. Its prefix counts as used."""
        return req.num_tokens - self._match(req).num_tokens

    def _match(self, req: Req) -> BaseCacheHandle:
        """The longest cached prefix that a request need not compute."""
        # Logits come from computed tokens only. The last token needs them; in a scored prompt all
        # do.
        most_matched = 0 if req.scores_prompt else req.num_known - 1
        return self._prefix_cache.match(_key_of(req, most_matched))

    def _write_row(self, req: Req, prefix: BaseCacheHandle, neighbour: int | None) -> None:
        """Write a request's known tokens to its row, and the pages of its prefix.

        Args:
            neighbour: another request whose row begins with this prefix.
        """
        assert req.row is not None
        first = 0
        if neighbour is not None:
            first = prefix.num_tokens
            self._table.copy_row(self._held[neighbour].row, req.row, first)
        else:
            self._table.write_pages(req.row, 0, self._prefix_cache.pages(prefix))
        self._table.write_tokens(req.row, first, req.tokens[first : req.num_known])

    def try_extend(self, req: Req) -> bool:
        """Make room for all tokens of a running request; False if there is no page."""
        missing = req.num_tokens - self._held[req.uid].num_slots
        if missing <= 0:
            return True
        wanted = self._num_pages_for(missing)
        if wanted > self.num_available:
            return False
        self._append_pages(req, wanted)
        return True

    def _append_pages(self, req: Req, num_pages: int) -> None:
        """Allocate pages at the end of a request's row."""
        assert req.row is not None
        holding = self._held[req.uid]
        pages = self._allocate(num_pages)
        self._table.write_pages(req.row, holding.num_slots // self.page_size, pages)
        holding.own += pages.tolist()
        holding.num_slots += num_pages * self.page_size

    def _allocate(self, num_pages: int) -> IntArray:
        if num_pages > self._num_free:
            self._give_back(self._prefix_cache.evict(num_pages - self._num_free))
        self._num_free -= num_pages
        return self._free[self._num_free : self._num_free + num_pages][::-1].copy()

    def publish(self, req: Req, num_tokens: int) -> BaseCacheHandle:
        """Put the first tokens of a request into the prefix cache, where other requests find them.

        Nothing changes if the cache has other pages for tokens whose pages are the request's own.
        The request then keeps its pages, and publishes what follows them when it is released.

        Args:
            num_tokens: they are computed, or will be in the next step.

        Returns:
            the prefix that the request had before, for `unpublish`.
        """
        holding = self._held[req.uid]
        before = holding.prefix
        key = _key_of(req, num_tokens)
        if self._prefix_cache.match(key, before).num_tokens > before.num_tokens:
            return before
        prefix = self._insert(holding, key).handle
        self._prefix_cache.lock(prefix, req.uid)
        del holding.own[: self._num_prefix_pages(prefix) - self._num_prefix_pages(before)]
        holding.prefix = prefix
        return before

    def unpublish(self, req: Req, before: BaseCacheHandle) -> None:
        """Undo `publish`. No other request may have locked what was published.

        Args:
            before: what `publish` returned.
        """
        holding = self._held[req.uid]
        published = holding.prefix
        pages = self._prefix_cache.pages(published)[self._num_prefix_pages(before) :]
        self._prefix_cache.unlock(published, req.uid)
        self._prefix_cache.lock(before, req.uid)
        self._prefix_cache.cut(published, before)
        holding.own[:0] = pages.tolist()
        holding.prefix = before

    def _insert(self, holding: _Holding, key: PrefixKey) -> InsertResult:
        """Insert the tokens of a key after a request's prefix, with the request's own pages."""
        num_new = len(key.tokens) // self.page_size - self._num_prefix_pages(holding.prefix)
        pages = np.array(holding.own[:num_new], dtype=np.int32)
        return self._prefix_cache.insert(key, pages, holding.prefix)

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The prefixes that many requests share; see `BasePrefixCache.shared_prefixes`."""
        return self._prefix_cache.shared_prefixes()

    def release(self, req: Req) -> None:
        """Release all that a request holds. No launched step may refer to it.

        Its computed tokens go to the prefix cache. If the request is not cacheable, they do not,
        and what no other request has of its prefix leaves the cache.
        """
        assert req.num_in_flight == 0
        assert req.row is not None
        holding = self._held.pop(req.uid)
        if req.is_cacheable:
            self._keep(holding, req)
        else:
            self._prefix_cache.unlock(holding.prefix, req.uid)
            self._give_back(self._prefix_cache.drop(holding.prefix))
        self._give_back(np.array(holding.own, dtype=np.int32))
        self._table.release(req.row)
        req.row = None
        req.num_computed = 0

    def _keep(self, holding: _Holding, req: Req) -> None:
        """Move what a request has computed to the prefix cache, and unlock its prefix."""
        result = self._insert(holding, _key_of(req, min(req.num_computed, req.num_known)))
        self._prefix_cache.unlock(holding.prefix, req.uid)
        # Its own pages:  the cache had others │ the cache took these │ not inserted
        # What happens:   stays its own        │ kept there           │ stays its own
        num_prefix_pages = self._num_prefix_pages(holding.prefix)
        begin = result.num_cached_tokens // self.page_size - num_prefix_pages
        end = self._num_prefix_pages(result.handle) - num_prefix_pages
        del holding.own[begin:end]

    def _num_prefix_pages(self, prefix: BaseCacheHandle) -> int:
        return prefix.num_tokens // self.page_size

    def _give_back(self, pages: IntArray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def flush(self) -> int:
        """Drop all cached prefixes that are not locked; returns how many tokens they had."""
        num_pages = self._prefix_cache.num_evictable
        self._give_back(self._prefix_cache.evict(num_pages))
        return num_pages * self.page_size

    def check_integrity(self, admitted: list[Req]) -> None:
        """Assert that each page has exactly one owner, and rows name pages that they may read."""
        own = [page for holding in self._held.values() for page in holding.own]
        cached = self._prefix_cache.check_integrity()
        free = self._free[: self._num_free]
        every_page = np.concatenate([free, cached, np.array(own, dtype=np.int32)])
        assert np.array_equal(np.sort(every_page), np.arange(self.num_pages))
        assert {req.uid: req.row for req in admitted} == {
            uid: holding.row for uid, holding in self._held.items()
        }
        pages_of_cache = set(cached.tolist())
        for req in admitted:
            holding = self._held[req.uid]
            assert pages_of_cache.issuperset(self._prefix_cache.pages(holding.prefix).tolist())
            num_pages = self._num_prefix_pages(holding.prefix) + len(holding.own)
            assert holding.num_slots == num_pages * self.page_size >= req.num_computed


def _key_of(req: Req, num_tokens: int) -> PrefixKey:
    """The first tokens of a request, in its namespace."""
    return PrefixKey(req.namespace, req.tokens[:num_tokens])
