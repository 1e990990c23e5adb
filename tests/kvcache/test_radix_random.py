"""The radix tree against a dictionary of all cached pages, through random operations."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

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
from minisgl.kvcache import BaseCacheHandle, RadixPrefixCache, radix_cache
from tests.kvcache.model import PageDict, Prefix, Tokens, key_of

# Two tokens and three namespaces only: everything has prefixes in common.
TOKENS = st.lists(st.integers(0, 1), max_size=12).map(tuple)
SEQUENCES = st.tuples(st.sampled_from(["", "a", "b"]), TOKENS)
Lock = tuple[BaseCacheHandle, Prefix, int]
FEWEST = 2  # lockers of a shared prefix, for these tests


@pytest.fixture(autouse=True)
def few_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_cache, "FEWEST_IN_GROUP", FEWEST)


class RadixMachine(RuleBasedStateMachine):
    """Does the same to a radix tree and to a dictionary, and compares all that can be seen."""

    locks = Bundle("locks")

    @initialize(page_size=st.sampled_from([1, 2, 3, 64]))
    def start(self, page_size: int) -> None:
        self.cache = RadixPrefixCache(page_size)
        self.model = PageDict(page_size)
        self.held: list[Lock] = []
        self.repeats = max(1, page_size // 2)
        self.new_pages = itertools.count()
        self.new_uids = itertools.count()

    def _enlarged(self, tokens: Tokens) -> Tokens:
        """Each token so often that a few fill a page."""
        return tuple(token for token in tokens for _ in range(self.repeats))

    @rule(prefix=SEQUENCES)
    def match(self, prefix: Prefix) -> None:
        prefix = (prefix[0], self._enlarged(prefix[1]))
        handle = self.cache.match(key_of(prefix))
        length = self.model.use(prefix)
        assert handle.num_tokens == length
        assert self.cache.pages(handle).tolist() == self.model.pages_of(cut(prefix, length))

    @rule(target=locks, prefix=SEQUENCES)
    def match_and_lock(self, prefix: Prefix) -> Lock:
        prefix = (prefix[0], self._enlarged(prefix[1]))
        handle = self.cache.match(key_of(prefix))
        return self._lock(handle, cut(prefix, self.model.use(prefix)))

    @rule(target=locks, prefix=SEQUENCES, keep=st.booleans())
    def insert(self, prefix: Prefix, keep: bool) -> object:
        prefix = (prefix[0], self._enlarged(prefix[1]))
        num_pages = len(prefix[1]) // self.model.page_size
        whole = cut(prefix, num_pages * self.model.page_size)
        pages = list(itertools.islice(self.new_pages, num_pages))
        result = self.cache.insert(key_of(prefix), np.array(pages, dtype=np.int32))
        assert result.num_cached_tokens == self.model.insert(whole, pages)
        assert result.handle.num_tokens == len(whole[1])
        assert self.cache.pages(result.handle).tolist() == self.model.pages_of(whole)
        return self._lock(result.handle, whole) if keep else multiple()

    @rule(target=locks, lock=consumes(locks), tokens=TOKENS)
    def extend(self, lock: Lock, tokens: Tokens) -> Lock:
        """Who has locked a prefix adds pages behind it, and locks them too."""
        before, (namespace, known), uid = lock
        tokens = self._enlarged(tokens)
        num_pages = len(tokens) // self.model.page_size
        whole = cut((namespace, known + tokens), len(known) + num_pages * self.model.page_size)
        pages = list(itertools.islice(self.new_pages, num_pages))
        length = self.model.use(whole)
        assert self.cache.match(key_of(whole), before).num_tokens == length
        result = self.cache.insert(key_of(whole), np.array(pages, dtype=np.int32), before)
        old_pages = self.model.pages_of((namespace, known))
        assert result.num_cached_tokens == self.model.insert(whole, old_pages + pages) == length
        self._forget(lock)
        return self._lock(result.handle, whole, uid)

    @rule(lock=locks, tokens=TOKENS)
    def extend_and_take_back(self, lock: Lock, tokens: Tokens) -> None:
        """Who has locked a prefix adds pages behind it that nobody has, and cuts them off again."""
        before, (namespace, known), _ = lock
        tokens = self._enlarged(tokens)
        num_pages = len(tokens) // self.model.page_size
        whole = cut((namespace, known + tokens), len(known) + num_pages * self.model.page_size)
        length = self.model.use(whole)
        assert self.cache.match(key_of(whole), before).num_tokens == length
        if length > len(known):
            return
        pages = list(itertools.islice(self.new_pages, num_pages))
        result = self.cache.insert(key_of(whole), np.array(pages, dtype=np.int32), before)
        self.model.insert(whole, self.model.pages_of((namespace, known)) + pages)
        assert self.cache.pages(result.handle).tolist() == self.model.pages_of(whole)
        self.cache.cut(result.handle, before)
        self.model.remove(pages)

    def _lock(self, handle: BaseCacheHandle, prefix: Prefix, uid: int | None = None) -> Lock:
        lock = (handle, prefix, next(self.new_uids) if uid is None else uid)
        self.cache.lock(handle, lock[2])
        self.model.locked.append(prefix)
        self.held.append(lock)
        return lock

    @rule(lock=consumes(locks))
    def unlock(self, lock: Lock) -> None:
        self.cache.unlock(lock[0], lock[2])
        self._forget(lock)

    @rule(lock=consumes(locks))
    def unlock_and_drop(self, lock: Lock) -> None:
        self.unlock(lock)
        assert sorted(self.cache.drop(lock[0]).tolist()) == sorted(self.model.drop(lock[1]))

    def _forget(self, lock: Lock) -> None:
        self.model.locked.remove(lock[1])
        self.held.remove(lock)

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages: int) -> None:
        if num_pages > len(self.model.unlocked()):
            with pytest.raises(CapacityError):
                self.cache.evict(num_pages)
            return
        expected = [self.model.evict() for _ in range(num_pages)]
        assert sorted(self.cache.evict(num_pages).tolist()) == sorted(expected)

    @invariant()
    def counts_and_pages_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert bool(self.cache._root.children) == bool(self.model.page)
        assert sorted(self.cache.check_integrity().tolist()) == sorted(self.model.page.values())
        assert self.cache.num_evictable == len(self.model.unlocked())

    @invariant()
    def locked_handles_name_their_pages(self) -> None:
        for handle, prefix, _ in getattr(self, "held", []):
            assert self.cache.pages(handle).tolist() == self.model.pages_of(prefix)

    @invariant()
    def what_has_been_locked_is_that_of_the_model(self) -> None:
        held = getattr(self, "held", [])
        for handle, _, _ in held[:1]:
            assert (self.cache.locking_uid(handle) is None) == (handle.num_tokens == 0)

        uids: dict[Prefix, set[int]] = defaultdict(set)
        for _, whole, uid in held:
            for prefix in self.model.prefixes(whole):
                uids[prefix].add(uid)
        many = {
            (len(prefix[1]), *sorted(who)) for prefix, who in uids.items() if len(who) >= FEWEST
        }
        assert {place for shared in self._shared_prefixes() for place in shared} == many

    def _shared_prefixes(self) -> Iterator[list[tuple[int, ...]]]:
        """Each page end of each edge that several have locked, and who they are."""
        size = self.model.page_size
        for shared in self.cache.shared_prefixes() if hasattr(self, "cache") else ():
            first = shared.above.num_tokens if shared.above else 0
            ends = range(first + size, shared.num_tokens + 1, size)
            yield [(end, *sorted(shared.locked_by)) for end in ends]


def cut(prefix: Prefix, num_tokens: int) -> Prefix:
    namespace, tokens = prefix
    return namespace, tokens[:num_tokens]


RadixMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
test_the_tree_agrees_with_a_dictionary_of_pages = RadixMachine.TestCase
