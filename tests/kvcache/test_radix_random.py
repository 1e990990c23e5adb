"""The radix tree against a dictionary of all cached pages, through random operations that shrink when they fail."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from minisgl.errors import CapacityError
from minisgl.kvcache import BaseCacheHandle, RadixPrefixCache
from tests.kvcache.model import PageDict, Tokens, ids

SEQUENCES = st.lists(st.integers(0, 1), max_size=12).map(
    tuple
)  # two tokens only: everything shares prefixes
Lock = tuple[BaseCacheHandle, Tokens]


class RadixMachine(RuleBasedStateMachine):
    """Does the same to a radix tree and to a dictionary, and compares all that can be seen."""

    locks = Bundle("locks")

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.cache = RadixPrefixCache(page_size)
        self.model = PageDict(page_size)
        self.held: list[Lock] = []
        self.new_pages = itertools.count()

    @rule(tokens=SEQUENCES)
    def match(self, tokens: Tokens) -> None:
        handle = self.cache.match(ids(*tokens))
        length = self.model.use(tokens)
        assert handle.num_tokens == length
        assert self.cache.pages(handle).tolist() == self.model.pages_of(tokens[:length])

    @rule(target=locks, tokens=SEQUENCES)
    def match_and_lock(self, tokens: Tokens) -> Lock:
        handle = self.cache.match(ids(*tokens))
        return self._lock(handle, tokens[: self.model.use(tokens)])

    @rule(target=locks, tokens=SEQUENCES, keep=st.booleans())
    def insert(self, tokens: Tokens, keep: bool) -> object:
        whole = tokens[: len(tokens) - len(tokens) % self.model.page_size]
        pages = list(itertools.islice(self.new_pages, len(whole) // self.model.page_size))
        result = self.cache.insert(ids(*tokens), np.array(pages, dtype=np.int32))
        assert result.num_existing == self.model.insert(whole, pages)
        assert result.handle.num_tokens == len(whole)
        assert self.cache.pages(result.handle).tolist() == self.model.pages_of(whole)
        return self._lock(result.handle, whole) if keep else multiple()

    def _lock(self, handle: BaseCacheHandle, tokens: Tokens) -> Lock:
        self.cache.lock(handle)
        self.model.locked.append(tokens)
        self.held.append((handle, tokens))
        return handle, tokens

    @rule(lock=consumes(locks))
    def unlock(self, lock: Lock) -> None:
        self.cache.unlock(lock[0])
        self.model.locked.remove(lock[1])
        self.held.remove(lock)

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages: int) -> None:
        unlocked, last_used = self.model.unlocked(), dict(self.model.last_used)
        if num_pages > len(unlocked):
            with pytest.raises(CapacityError):
                self.cache.evict(num_pages)
            return
        pages = self.cache.evict(num_pages).tolist()
        gone = self.model.remove(pages)
        assert len(pages) == len(set(pages)) == len(gone) >= num_pages
        assert gone <= unlocked
        self._check_order(
            [last_used[it] for it in gone], [last_used[it] for it in unlocked - gone], num_pages
        )

    def _check_order(self, gone: list[int], left: list[int], num_pages: int) -> None:
        """Nothing left is older than what went, and no more went than had to: all but the newest were too few."""
        newest = max(gone, default=0)
        assert newest <= min(left, default=newest)
        assert sum(age < newest for age in gone) < max(num_pages, 1)

    @invariant()
    def counts_and_pages_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert sorted(self.cache.check_integrity().tolist()) == sorted(self.model.page.values())
        assert self.cache.num_pages == len(self.model.page)
        assert self.cache.num_evictable == len(self.model.unlocked())

    @invariant()
    def locked_handles_name_their_pages(self) -> None:
        for handle, tokens in getattr(self, "held", []):
            assert self.cache.pages(handle).tolist() == self.model.pages_of(tokens)


RadixMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
test_the_tree_agrees_with_a_dictionary_of_pages = RadixMachine.TestCase
