"""The contract of every BasePrefixCache: it may keep nothing, but what it says must be true."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import IntArray
from minisgl.errors import CapacityError
from minisgl.kvcache import (
    PREFIX_CACHES,
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    PrefixKey,
    create_prefix_cache,
)
from tests.kvcache.model import key_of_pages, snapshot, whole_pages


@pytest.fixture(params=PREFIX_CACHES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 3, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def cache(kind: str, page_size: int) -> BasePrefixCache:
    return create_prefix_cache(kind, page_size)


def pages_from(first: int, num_pages: int) -> IntArray:
    return np.arange(first, first + num_pages, dtype=np.int32)


def insert(cache: BasePrefixCache, text: str, first_page: int, namespace: str = "") -> InsertResult:
    key = key_of_pages(text, cache.page_size, namespace)
    return cache.insert(key, pages_from(first_page, len(text)))


def match(cache: BasePrefixCache, text: str, namespace: str = "") -> BaseCacheHandle:
    return cache.match(key_of_pages(text, cache.page_size, namespace))


def test_a_new_cache_is_empty(cache: BasePrefixCache) -> None:
    handle = match(cache, "abc")

    assert (handle.num_tokens, len(cache.pages(handle))) == (0, 0)
    assert (cache.num_evictable, len(cache.check_integrity())) == (0, 0)


def test_insert_says_which_pages_the_caller_keeps(cache: BasePrefixCache) -> None:
    first = insert(cache, "abc", 10)
    second = insert(cache, "abde", 20)

    taken = [
        set(
            range(
                start + result.num_cached_tokens // cache.page_size,
                start + result.handle.num_tokens // cache.page_size,
            )
        )
        for start, result in ((10, first), (20, second))
    ]
    held = cache.check_integrity().tolist()
    assert set(held) == taken[0] | taken[1]
    assert len(held) == len(taken[0]) + len(taken[1])


def test_a_handle_covers_whole_pages_of_what_was_asked(cache: BasePrefixCache) -> None:
    insert(cache, "abc", 0)
    tokens = whole_pages("abcd", cache.page_size)

    for length in range(len(tokens) + 1):
        handle = cache.match(PrefixKey("", tokens[:length]))
        assert handle.num_tokens % cache.page_size == 0
        assert handle.num_tokens <= length
        assert len(cache.pages(handle)) == handle.num_tokens // cache.page_size


def test_the_caller_may_reuse_its_arrays_after_insert(cache: BasePrefixCache) -> None:
    key = key_of_pages("abc", cache.page_size)
    pages = pages_from(0, 3)
    cache.insert(key, pages)
    key.tokens[:] = -1
    pages[:] = -1

    handle = match(cache, "abc")
    assert cache.pages(handle).tolist() == [0, 1, 2][: len(cache.pages(handle))]
    assert -1 not in cache.check_integrity()


def test_an_empty_insert_and_an_empty_match_hold_nothing(cache: BasePrefixCache) -> None:
    result = insert(cache, "", 0)

    assert (result.handle.num_tokens, result.num_cached_tokens) == (0, 0)
    assert match(cache, "").num_tokens == 0
    assert len(cache.evict(0)) == 0


def test_evict_gives_each_page_once_and_forgets_it(cache: BasePrefixCache) -> None:
    for first, text in ((0, "abc"), (10, "abd"), (20, "xyz")):
        insert(cache, text, first)
    held = sorted(cache.check_integrity().tolist())

    assert sorted(cache.evict(cache.num_evictable).tolist()) == held
    assert (cache.num_evictable, len(cache.check_integrity())) == (0, 0)
    assert match(cache, "abc").num_tokens == 0


def test_the_end_of_a_prefix_can_be_cut_off(cache: BasePrefixCache) -> None:
    before = insert(cache, "ab", 0).handle
    cache.lock(before, 1)
    page_list = snapshot(cache, [before])
    key = key_of_pages("abcde", cache.page_size)
    whole = cache.insert(key, pages_from(10, 3), before).handle
    match(cache, "abcx")  # a reader splits what is cut off then

    cache.cut(whole, before)

    assert match(cache, "abcde").num_tokens == before.num_tokens
    assert snapshot(cache, [before]) == page_list
    cache.unlock(before, 1)
    assert len(cache.evict(cache.num_evictable)) == before.num_tokens // cache.page_size


def test_what_nobody_else_has_of_a_prefix_can_be_dropped(cache: BasePrefixCache) -> None:
    insert(cache, "abcx", 0)
    before = insert(cache, "ab", 0).handle
    cache.lock(before, 1)
    whole = insert(cache, "abcde", 10).handle
    num_pages = len(cache.check_integrity())

    dropped = cache.drop(whole)

    assert dropped.tolist() == [13, 14][: len(dropped)]
    assert len(cache.check_integrity()) == num_pages - len(dropped)
    assert match(cache, "abcde").num_tokens == match(cache, "abc").num_tokens
    assert len(cache.drop(before)) == 0  # it is locked, and a longer prefix begins with it
    rest = cache.drop(match(cache, "abcx"))
    assert match(cache, "abcx").num_tokens == before.num_tokens
    cache.unlock(before, 1)
    assert len(rest) + len(cache.drop(before)) == num_pages - len(dropped)
    assert len(cache.check_integrity()) == 0


def test_evicting_more_than_is_unlocked_raises_and_changes_nothing(cache: BasePrefixCache) -> None:
    handle = insert(cache, "abc", 0).handle
    insert(cache, "abd", 10)
    cache.lock(handle, 1)
    before = snapshot(cache, [handle])

    with pytest.raises(
        CapacityError, match=rf"{cache.num_evictable + 1} pages wanted, {cache.num_evictable} free"
    ):
        cache.evict(cache.num_evictable + 1)
    assert snapshot(cache, [handle]) == before


def test_a_locked_prefix_outlives_every_eviction(cache: BasePrefixCache) -> None:
    handle = insert(cache, "ab", 0).handle
    cache.lock(handle, 1)
    pages = cache.pages(handle).tolist()
    insert(cache, "abc", 10)
    insert(cache, "x", 20)

    evicted = cache.evict(cache.num_evictable).tolist()

    assert cache.pages(handle).tolist() == pages
    assert not set(pages) & set(evicted)
    assert match(cache, "abc").num_tokens == handle.num_tokens


def test_a_prefix_is_locked_until_the_last_uid_unlocks_it(cache: BasePrefixCache) -> None:
    handle = insert(cache, "abc", 0).handle
    cache.lock(handle, 1)
    cache.lock(match(cache, "abc"), 2)
    cache.unlock(handle, 1)
    assert cache.num_evictable == 0

    cache.unlock(handle, 2)
    assert cache.num_evictable == len(cache.check_integrity())


def test_a_uid_may_lock_a_longer_prefix_and_unlocks_it_all(cache: BasePrefixCache) -> None:
    prefix = insert(cache, "ab", 0).handle
    cache.lock(prefix, 1)
    key = key_of_pages("abcd", cache.page_size)
    rest = pages_from(20, len("abcd") - len(cache.pages(prefix)))
    result = cache.insert(key, rest, after=prefix)
    cache.lock(result.handle, 1)
    assert cache.num_evictable == 0
    assert cache.match(key, after=prefix).num_tokens == result.handle.num_tokens

    cache.unlock(result.handle, 1)
    assert cache.num_evictable == len(cache.check_integrity())
    cache.check_integrity()


def test_two_namespaces_have_no_prefix_in_common(cache: BasePrefixCache) -> None:
    first = insert(cache, "abc", 0, "one")
    second = insert(cache, "abcd", 10, "two")
    insert(cache, "ab", 20)

    assert second.num_cached_tokens == 0
    assert not set(cache.pages(first.handle)) & set(cache.pages(second.handle))
    assert match(cache, "abcd", "one").num_tokens == first.handle.num_tokens
    assert match(cache, "abcd", "three").num_tokens == 0
