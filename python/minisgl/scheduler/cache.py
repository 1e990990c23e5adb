"""Pages: each is either free, or held by a request, or in the prefix cache.

The page-table row of a request, and who owns the pages:

    row      │ cached prefix │ duplicates │ published │ tail    │
    owner    │ cache         │ request    │ cache     │ request │

    cached prefix   pages that the cache had when the request was admitted
    duplicates      pages whose tokens the cache already held when they were published
    published       pages that the request gave to the cache
    tail            pages that are not published yet

The row only grows. `publish` moves pages from the tail to the cache. Where another request has
published pages for these tokens before, the request keeps its own as duplicates: launched steps may
read them. They are released when the request ends or is retracted.

Owns the free pages, the prefix cache, and the record of what each request holds. Only
`num_pages_for` counts pages of tokens, so admission and allocation agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.core import IntArray, Req
from minisgl.kvcache import BaseCacheHandle, BasePrefixCache, PrefixKey
from minisgl.scheduler.table import TableManager


@dataclass(slots=True)
class _Holding:
    """What one admitted request holds: a locked prefix, and pages of its own.

    Attributes:
        pages: its row of the page table, from the start.
    """

    handle: BaseCacheHandle
    pages: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)

    def own_pages(self, page_size: int) -> list[int]:
        return self.duplicates + self.pages[self.handle.num_tokens // page_size :]


class CacheManager:
    """Allocates and releases the pages of requests; evicts cached prefixes if none are free."""

    def __init__(self, num_pages: int, prefix_cache: BasePrefixCache, table: TableManager) -> None:
        self.page_size = prefix_cache.page_size
        self.num_pages = num_pages
        self._cache = prefix_cache
        self._table = table
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack of _num_free pages
        self._num_free = num_pages
        self._held: dict[int, _Holding] = {}

    @property
    def caches_prefixes(self) -> bool:
        """Whether a published prefix is kept for other requests."""
        return self._cache.caches_prefixes

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self._num_free + self._cache.num_evictable

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of this length needs; the last one may be filled in part."""
        return -(-num_tokens // self.page_size)

    def try_admit(self, req: Req, reserve: int) -> bool:
        """Give a request a row, its cached prefix, and pages for all its tokens.

        Args:
            reserve: pages that must be left over for the requests already running.

        Returns:
            False, and nothing has changed, if the pages do not suffice.
        """
        tokens = req.tokens[: req.num_known]
        # Only computed tokens have logits: the last one needs them, or all of a prompt to score.
        num_matched = 0 if req.scores_prompt else len(tokens) - 1
        handle = self._cache.match(_key_of(req, num_matched))
        self._cache.lock(handle)
        wanted = self.num_pages_for(req.num_tokens) - handle.num_tokens // self.page_size
        if wanted + reserve > self.num_available:
            self._cache.unlock(handle)
            return False
        req.row = self._table.allocate(tokens)
        self._held[req.uid] = _Holding(handle)
        self._append(req, self._cache.pages(handle))
        self._append(req, self._allocate(wanted))
        req.num_computed = handle.num_tokens
        if req.num_cached is None:
            req.num_cached = handle.num_tokens
        return True

    def try_extend(self, req: Req) -> bool:
        """Make room for all tokens of a running request; False if there is no page."""
        wanted = self.num_pages_for(req.num_tokens) - len(self._held[req.uid].pages)
        if wanted <= 0:
            return True
        if wanted > self.num_available:
            return False
        self._append(req, self._allocate(wanted))
        return True

    def publish(self, req: Req) -> None:
        """Put what is computed of a request into the prefix cache, where other requests find it."""
        holding = self._held[req.uid]
        num_pages = min(req.num_computed, req.num_known) // self.page_size
        key = _key_of(req, num_pages * self.page_size)
        result = self._cache.insert(key, np.array(holding.pages[:num_pages], dtype=np.int32))
        first_own = holding.handle.num_tokens // self.page_size
        holding.duplicates += holding.pages[first_own : result.num_cached_tokens // self.page_size]
        self._cache.lock(result.handle)
        self._cache.unlock(holding.handle)
        holding.handle = result.handle

    def num_shared_tokens(self, reqs: list[Req]) -> int:
        """Leading tokens whose pages all these requests have in common."""
        first, *others = (self._held[req.uid].pages for req in reqs)
        if not others:
            return 0
        length = len(first)
        for pages in others:
            if pages[:length] != first[:length]:
                length = _num_equal(first[:length], pages)
            if length == 0:
                break
        return length * self.page_size

    def release(self, req: Req) -> None:
        """Release all that a request holds. No launched step may refer to it."""
        assert req.num_in_flight == 0
        assert req.row is not None
        self.publish(req)
        holding = self._held.pop(req.uid)
        self._cache.unlock(holding.handle)
        self._give_back(np.array(holding.own_pages(self.page_size), dtype=np.int32))
        self._table.release(req.row)
        req.row = None
        req.num_computed = 0

    def _append(self, req: Req, pages: IntArray) -> None:
        assert req.row is not None
        held = self._held[req.uid].pages
        self._table.append_pages(req.row, len(held), pages)
        held += pages.tolist()

    def _allocate(self, num_pages: int) -> IntArray:
        if num_pages > self._num_free:
            self._give_back(self._cache.evict(num_pages - self._num_free))
        self._num_free -= num_pages
        return self._free[self._num_free : self._num_free + num_pages][::-1].copy()

    def _give_back(self, pages: IntArray) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def check_integrity(self, admitted: list[Req]) -> None:
        """Assert that each page has exactly one owner, and rows name pages that they may read."""
        own = [page for held in self._held.values() for page in held.own_pages(self.page_size)]
        cached = self._cache.check_integrity()
        free = self._free[: self._num_free]
        every_page = np.concatenate([free, cached, np.array(own, dtype=np.int32)])
        assert np.array_equal(np.sort(every_page), np.arange(self.num_pages))
        assert {req.uid for req in admitted} == self._held.keys()
        for req in admitted:
            holding = self._held[req.uid]
            num_cached = holding.handle.num_tokens // self.page_size
            pages_of_cache = set(holding.pages[:num_cached]) - set(holding.duplicates)
            assert pages_of_cache <= set(cached.tolist())
            assert len(holding.pages) >= self.num_pages_for(req.num_computed)


def _key_of(req: Req, num_tokens: int) -> PrefixKey:
    """The first tokens of a request, in its namespace."""
    return PrefixKey(req.namespace, req.tokens[:num_tokens])


def _num_equal(pages: list[int], others: list[int]) -> int:
    """Leading pages that two rows have in common."""
    pairs = enumerate(zip(pages, others, strict=False))
    differing = (i for i, (page, other) in pairs if page != other)
    return next(differing, min(len(pages), len(others)))
