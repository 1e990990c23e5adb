"""The radix tree by example: what is found, split, protected and evicted, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from minisgl.core import IntArray
from minisgl.kvcache import BaseCacheHandle, InsertResult, PrefixKey, RadixPrefixCache, radix_cache
from minisgl.kvcache.radix_cache import common_prefix_length
from tests.kvcache.model import key_of_pages


class Tree(RadixPrefixCache):
    """A radix tree over words whose letters are pages."""

    def put(self, word: str, first_page: int, namespace: str = "") -> InsertResult:
        pages = np.arange(first_page, first_page + len(word), dtype=np.int32)
        return self.insert(self.key(word, namespace), pages)

    def get(self, word: str, namespace: str = "") -> list[int]:
        return self.pages(self.match(self.key(word, namespace))).tolist()

    def shared(self) -> set[tuple[int, int]]:
        """How many pages each prefix has that many have locked, and how many these are."""
        prefixes = self.shared_prefixes()
        return {(each.num_tokens // self.page_size, len(each.locked_by)) for each in prefixes}

    def key(self, word: str, namespace: str = "") -> PrefixKey:
        return key_of_pages(word, self.page_size, namespace)


@pytest.fixture(params=[1, 4])
def tree(request: pytest.FixtureRequest) -> Tree:
    return Tree(request.param)


def test_the_longest_prefix_in_whole_pages_is_found(tree: Tree) -> None:
    tree.put("abcd", 0)

    assert tree.get("abcd") == [0, 1, 2, 3]
    assert tree.get("abxd") == [0, 1]
    assert tree.get("x") == []


def test_a_page_that_differs_in_its_last_token_is_not_shared() -> None:
    tree = Tree(4)
    tree.put("ab", 0)
    key = tree.key("ab")
    key.tokens[7] += 1

    assert tree.match(key).num_tokens == 4
    assert tree.match(PrefixKey("", key.tokens[:3])).num_tokens == 0


def test_namespaces_are_apart_even_where_their_keys_look_alike() -> None:
    """One namespace is another one with the first token's bytes after it."""
    tree = Tree(1)
    tokens = np.array([0x41414141, 0x41414141], dtype=np.int32)
    pages = np.arange(2, dtype=np.int32)
    tree.insert(PrefixKey("x", tokens), pages)
    tree.insert(PrefixKey("xAAAA", tokens), pages + 2)

    assert tree.match(PrefixKey("", tokens)).num_tokens == 0
    assert tree.pages(tree.match(PrefixKey("x", tokens))).tolist() == [0, 1]
    assert tree.pages(tree.match(PrefixKey("xAAAA", tokens))).tolist() == [2, 3]
    assert tree.match(PrefixKey("xAAAAAAAA", tokens)).num_tokens == 0


def test_any_text_is_a_namespace(tree: Tree) -> None:
    for first, namespace in enumerate(["", "\0", "é", "\ud800", "a" * 256]):
        tree.put("a", first, namespace)
        assert tree.get("a", namespace) == [first]


def test_eviction_is_over_all_namespaces_and_an_empty_one_leaves_nothing(tree: Tree) -> None:
    for first, namespace in enumerate(["one", "two", "", "three"]):
        tree.put("ab", 2 * first, namespace)
    tree.get("ab", "one")

    assert sorted(tree.evict(2).tolist()) == [2, 3]
    assert sorted(tree.evict(6).tolist()) == [0, 1, 4, 5, 6, 7]
    assert tree._root.children == {}


def test_a_split_edge_stays_in_its_namespace(tree: Tree) -> None:
    tree.put("abc", 0, "one")
    tree.put("abd", 10, "one")

    assert tree.get("abd", "one") == [0, 1, 12]
    assert tree.get("abd") == []
    tree.check_integrity()


def test_an_insert_keeps_the_pages_that_are_there(tree: Tree) -> None:
    tree.put("abc", 0)
    result = tree.put("abde", 10)

    assert result.num_cached_tokens == 2 * tree.page_size
    assert tree.pages(result.handle).tolist() == [0, 1, 12, 13]
    assert len(tree.check_integrity()) == 5


def test_inserting_the_same_again_takes_nothing(tree: Tree) -> None:
    first = tree.put("abc", 0)
    second = tree.put("abc", 10)

    assert second.num_cached_tokens == second.handle.num_tokens == 3 * tree.page_size
    assert tree.pages(second.handle).tolist() == tree.pages(first.handle).tolist() == [0, 1, 2]


def test_splitting_an_edge_leaves_its_handles_valid(tree: Tree) -> None:
    whole = tree.put("abcdef", 0).handle
    tree.lock(whole, 1)
    for word in ("abcx", "abx", "a"):
        tree.match(tree.key(word))
        tree.check_integrity()

    assert tree.pages(whole).tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.num_evictable == 0
    tree.unlock(whole, 1)
    assert tree.num_evictable == 6
    tree.check_integrity()


def test_a_lock_protects_the_upper_part_of_a_split_edge_only(tree: Tree) -> None:
    tree.put("abcd", 0)
    upper = tree.match(tree.key("ab"))
    tree.lock(upper, 1)

    assert tree.num_evictable == 2
    assert sorted(tree.evict(2).tolist()) == [2, 3]
    assert tree.get("abcd") == [0, 1]


def test_the_least_recently_used_goes_first(tree: Tree) -> None:
    for first, word in enumerate("abc"):
        tree.put(word, first)
    tree.match(tree.key("a"))

    assert [tree.evict(1).tolist() for _ in range(3)] == [[1], [2], [0]]


def test_a_parent_goes_after_its_children(tree: Tree) -> None:
    tree.put("ab", 0)
    tree.put("acd", 10)

    order: list[int] = []
    while tree.num_evictable:
        order += sorted(tree.evict(1).tolist(), reverse=True)
    assert order == [1, 12, 11, 0]


def test_unlocking_is_no_use(tree: Tree) -> None:
    """A request that ran long does not push its prefix behind those that were used since."""
    old = tree.put("a", 0).handle
    tree.lock(old, 1)
    tree.put("b", 1)
    tree.unlock(old, 1)

    assert tree.evict(1).tolist() == [0]


def test_locked_leaves_are_passed_over(tree: Tree) -> None:
    handles = [tree.put(word, first).handle for first, word in enumerate("abcd")]
    tree.lock(handles[0], 1)
    tree.lock(handles[2], 2)

    assert sorted(tree.evict(2).tolist()) == [1, 3]
    assert len(tree.check_integrity()) == 2


def test_an_evicted_prefix_can_come_back(tree: Tree) -> None:
    tree.put("ab", 0)
    tree.evict(2)
    tree.put("ab", 5)

    assert tree.get("ab") == [5, 6]
    assert sorted(tree.evict(2).tolist()) == [5, 6]


def test_who_has_locked_what_is_read_off_the_tree(
    tree: Tree,
) -> None:
    handles = [tree.put(word, 10 * i).handle for i, word in enumerate(["abcd", "abce", "abx"])]
    for uid, handle in enumerate(handles):
        tree.lock(handle, uid)
    assert tree.locking_uid(handles[2]) == 2
    assert tree.locking_uid(tree.match(tree.key("abc"))) in (0, 1)
    tree.unlock(handles[2], 2)
    assert tree.locking_uid(handles[2]) is None
    assert tree.locking_uid(tree.match(tree.key("x"))) is None
    tree.check_integrity()


def test_a_prefix_is_shared_as_long_as_enough_have_locked_it(tree: Tree) -> None:
    handles = [tree.put(word, 10 * i).handle for i, word in enumerate(["abcd", "abce", "x"])]
    for uid in range(14):
        tree.lock(handles[uid % 2], uid)
    assert tree.shared() == {(3, 14)}
    for uid in range(20, 28):
        tree.lock(handles[0], uid)
        tree.lock(handles[2], 100 + uid)
    assert tree.shared() == {(3, 22), (4, 15), (1, 8)}
    tree.get("ab")  # an edge is split
    assert tree.shared() == {(3, 22), (4, 15), (1, 8)}
    tree.unlock(handles[2], 120)
    for uid in range(20, 28):
        tree.unlock(handles[0], uid)
    assert tree.shared() == {(3, 14)}
    tree.check_integrity()


def test_a_shared_prefix_is_one_wherever_others_have_left_it(tree: Tree) -> None:
    word = "abcdefghijkl"
    for length in range(len(word)):
        tree.put(word[:length] + "x", 10 * length)
    whole = tree.put(word, 1000).handle
    half = tree.match(tree.key(word[:6]))
    for uid in range(20):
        tree.lock(whole if uid < 16 else half, uid)
    prefixes = sorted(tree.shared_prefixes(), key=lambda prefix: prefix.num_tokens)
    assert tree.shared() == {(6, 20), (12, 16)}
    assert [prefix.above for prefix in prefixes] == [None, prefixes[0]]


def test_a_walk_goes_on_after_a_prefix_without_comparing_it_again(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tree.put("a" * 50, 0).handle
    tree.lock(prefix, 1)
    compared: list[int] = []

    def counting(tokens: IntArray, others: IntArray) -> int:
        compared.append(len(tokens))
        return common_prefix_length(tokens, others)

    monkeypatch.setattr(radix_cache, "common_prefix_length", counting)
    key = tree.key("a" * 50 + "bc")
    tree.insert(key, np.arange(60, 62, dtype=np.int32), after=prefix)
    assert compared == []

    assert tree.match(key, after=prefix).num_tokens == 52 * tree.page_size
    assert compared == [2 * tree.page_size]


def num_edges(tree: Tree, word: str) -> int:
    return len(list(radix_cache._node_of(tree.match(tree.key(word))).path()))


def test_a_conversation_is_one_edge_however_many_turns_it_has(tree: Tree) -> None:
    turns = "abcdefghijklmnopqrstuvwxyz"
    for end in range(1, len(turns) + 1):
        handle = tree.match(tree.key(turns[:end]))
        tree.lock(handle, end)
        tree.insert(tree.key(turns[:end]), np.array([end], dtype=np.int32), after=handle)
        tree.unlock(handle, end)
        tree.check_integrity()

    assert tree.get(turns) == list(range(1, len(turns) + 1))
    assert num_edges(tree, turns) == 1
    assert tree.evict(26).tolist() == list(range(1, 27))


def test_edges_are_not_joined_across_branches_and_ends_of_locks(tree: Tree) -> None:
    tree.put("abcdef", 0)
    tree.put("abx", 10)
    tree.lock(tree.match(tree.key("abcd")), 1)
    assert num_edges(tree, "abcdef") == 3
    assert tree.num_evictable == 3

    tree.unlock(tree.match(tree.key("abcd")), 1)
    assert num_edges(tree, "abcdef") == 2
    tree.get("abc")  # a walk that ends within an edge divides it
    tree.get("abx")
    assert tree.evict(3).tolist() == [3, 4, 5]
    tree.check_integrity()


def test_what_was_joined_keeps_no_memory(tree: Tree) -> None:
    for end in range(1, 200):
        tree.put("a" * end, 0)
        tree.get("a" * end)
    held = sum(node.tokens.nbytes for _, _, node in tree._order._heap if node.parent is None)
    assert held == 0
    assert bytes_held(tree) <= 2 * 199 * (tree.page_size + 1) * 4


def bytes_held(tree: Tree) -> int:
    """Memory of all arrays that are kept alive by the tree's edges."""
    bases: dict[int, int] = {}
    nodes = [*tree._root.children.values()]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        for array in (node.tokens, node.pages):
            base = array if array.base is None else array.base
            bases[id(base)] = base.nbytes
    return sum(bases.values())


def test_what_is_left_of_an_edge_does_not_keep_all_of_it_in_memory(tree: Tree) -> None:
    first = 0
    for letter in "abc":  # of each a page is left
        tree.put(letter + "x" * 999, first)
        tree.lock(tree.match(tree.key(letter)), uid=first)
        tree.evict(999)
        first += 1000
    for letter in "def":  # of each two pages are left, evicted one by one
        tree.put(letter + "x" * 999, first)
        for _ in range(998):
            tree.evict(1)
        tree.lock(tree.match(tree.key(letter + "x")), uid=first)
        first += 1000

    num_pages = len(tree.check_integrity())
    assert num_pages == 3 + 6
    assert bytes_held(tree) <= 2 * num_pages * (tree.page_size + 1) * 4


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of the radix tree's code some work executes: its cost, without a clock."""
    count = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename == radix_cache.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def full_tree(num_leaves: int) -> Tree:
    """Half of the leaves follow a common first page; every leaf used twice leaves stale entries."""
    tree = Tree(1)
    tokens = np.arange(3 * num_leaves, dtype=np.int32).reshape(-1, 3)
    tokens[::2, 0] = 0
    for _ in range(2):
        for row in tokens:
            tree.insert(PrefixKey("", row), row)
    return tree


@pytest.mark.parametrize("num_leaves", [200, 2000])
def test_the_cost_of_an_eviction_does_not_grow_with_the_tree(num_leaves: int) -> None:
    tree = full_tree(num_leaves)
    num_evictions = 100

    cost = lines_run(lambda: [tree.evict(1) for _ in range(num_evictions)])

    assert cost / num_evictions < 150


def test_filling_and_emptying_costs_the_same_per_page_in_a_large_tree() -> None:
    def churn(num_leaves: int) -> None:
        tree = full_tree(num_leaves)
        while tree.num_evictable:
            tree.evict(1)

    small = lines_run(lambda: churn(100))
    large = lines_run(lambda: churn(800))
    assert large < 8 * small * 1.3


def comb(num_pages: int) -> tuple[Tree, BaseCacheHandle, PrefixKey]:
    """A tree with a branch at each page; its longest prefix, locked; and a key that goes on."""
    tree = Tree(1)
    key = PrefixKey("", np.arange(num_pages + 1, dtype=np.int32))
    for end in range(num_pages, 0, -1):
        tokens = key.tokens[:end].copy()
        tokens[-1] = -1
        for branch in (tokens, key.tokens[:end]):
            tree.insert(PrefixKey("", branch), branch)
    handle = tree.match(key)
    tree.lock(handle, 1)
    return tree, handle, key


def test_going_on_after_a_prefix_costs_the_same_however_many_branches_it_has() -> None:
    costs = []
    for num_pages in (50, 500):
        tree, handle, key = comb(num_pages)
        costs.append(lines_run(lambda: tree.match(key, handle)))  # noqa: B023 - runs here
    assert costs[0] == costs[1]


def test_a_page_that_was_found_by_its_tokens_is_not_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, handle, key = comb(50)
    monkeypatch.setattr(radix_cache, "common_prefix_length", None)
    assert tree.match(key).num_tokens == handle.num_tokens == 50


def test_a_branch_point_is_as_recently_used_as_what_followed_it(tree: Tree) -> None:
    """Who uses a leaf uses all before it, which counts once the leaf is gone."""
    tree.put("ab", 0)
    tree.put("ac", 10)
    tree.put("x", 20)
    locked = tree.match(tree.key("x"))
    tree.lock(locked, 1)
    tree.get("ab")
    assert tree.evict(2).tolist() == [11, 1]
    tree.unlock(locked, 1)
    assert tree.evict(1).tolist() == [20]  # "a" was used later
    assert tree.evict(1).tolist() == [0]


def test_matching_again_and_again_leaves_no_litter() -> None:
    tree = full_tree(10)
    path = PrefixKey("", np.array([0, 1, 2], dtype=np.int32))

    cost = lines_run(lambda: [tree.match(path) for _ in range(1000)])

    assert cost < 1000 * 150
    assert len(tree._order) < 100 + 5 * len(tree.check_integrity())


def test_turns_that_are_cut_off_and_come_back_leave_no_litter(tree: Tree) -> None:
    """Each cut makes an evictable leaf of a node that is joined with the next turn."""
    tree.put("ab", 0)
    for _ in range(1000):
        whole = tree.match(tree.key("ab"))
        tree.cut(whole, after=tree.match(tree.key("a")))
        tree.put("ab", 0)
    assert len(tree._order) < 100 + 5 * len(tree.check_integrity())


def test_every_page_can_still_be_evicted_after_the_litter_was_swept() -> None:
    tree = full_tree(30)
    handles = [
        tree.match(PrefixKey("", np.arange(3 * leaf, 3 * leaf + 3, dtype=np.int32)))
        for leaf in range(1, 30, 2)
    ]
    for uid, handle in enumerate(handles):
        tree.lock(handle, uid)
    for _ in range(1000):
        tree.match(PrefixKey("", np.arange(3, dtype=np.int32)))
    for uid, handle in enumerate(handles):
        tree.unlock(handle, uid)
    pages = sorted(tree.check_integrity().tolist())

    assert tree.num_evictable == len(pages)
    assert sorted(tree.evict(len(pages)).tolist()) == pages


def test_locking_again_and_again_costs_the_same_each_time() -> None:
    tree = full_tree(10)
    handle = tree.match(PrefixKey("", np.arange(3, dtype=np.int32)))

    def lock_and_unlock() -> None:
        tree.lock(handle, 1)
        tree.unlock(handle, 1)

    first = lines_run(lambda: [lock_and_unlock() for _ in range(100)])
    for _ in range(1000):
        lock_and_unlock()
    last = lines_run(lambda: [lock_and_unlock() for _ in range(100)])
    assert last < 2 * first
