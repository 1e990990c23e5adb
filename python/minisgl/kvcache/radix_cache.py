"""Prefix reuse through a radix tree (Zheng et al. 2023, arXiv:2312.07104).

    root ─┬─ [system prompt] ─┬─ [question A] ── [answer]
          │                   └─ [question B]
          └─ "salt" [system prompt]

An edge carries a run of whole pages: their tokens and their page ids. A node finds a child by the
tokens of its first page, the root by a namespace and that page. A namespace exists only in the
root's keys: when its last page is evicted, nothing of it remains.

Edges that follow each other without a branch are joined when they are used again, unless they are
locked. So the length of a walk grows with branches and locks, not with the turns of a conversation.

Locking a node locks the path from the root to it, and each node knows the requests that have locked
it. So the tree tells which requests have a prefix in common. Unlocked nodes have no locked
descendants.

Eviction removes pages from the end of an unlocked leaf; `eviction.py` chooses the leaf. A walk uses
all nodes on its way, but writes the time of use to the last one alone. The nodes above are evicted
after it, so that is enough: when a child is removed, its parent takes over the later time.

Next to read: `eviction.py`, then `engine/steps.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from minisgl.core import FEWEST_IN_GROUP, IntArray
from minisgl.errors import CapacityError
from minisgl.kvcache.base import (
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    PrefixKey,
    SharedPrefix,
)
from minisgl.kvcache.eviction import Evictable, EvictionOrder

_EMPTY: IntArray = np.empty(0, dtype=np.int32)


class _Node(Evictable):
    """One edge of the tree and the node at its end.

    Attributes:
        key: of this node among its parent's children; `_child_key` makes it.
        parent: None for the root, and for a node that was evicted.
        locked_by: uids of the requests that have locked it; they have locked its parent too.
    """

    __slots__ = ("children", "key", "locked_by", "pages", "parent", "tokens")

    def __init__(self, key: bytes, tokens: IntArray, pages: IntArray, parent: _Node | None) -> None:
        super().__init__()
        self.key = key
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.locked_by: set[int] = set()

    @property
    def is_evictable(self) -> bool:
        return not self.locked_by and not self.children and self.parent is not None

    def path(self) -> Iterator[_Node]:
        """From here up to the root, without it."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class _RadixHandle(BaseCacheHandle, frozen=True, eq=False):
    node: _Node


class RadixPrefixCache(BasePrefixCache):
    """A radix tree over pages of tokens. Two siblings never begin with the same page."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._root = _Node(b"", _EMPTY, _EMPTY, None)
        self._order: EvictionOrder[_Node] = EvictionOrder()
        # Nodes that `FEWEST_IN_GROUP` requests or more have locked: a set in insertion order, over
        # which all ranks iterate alike.
        self._shared: dict[_Node, None] = {}
        self._num_pages = 0
        self._num_evictable = 0

    def match(self, key: PrefixKey, after: BaseCacheHandle | None = None) -> BaseCacheHandle:
        node, length = self._walk(key, after)
        return _RadixHandle(length, node)

    def pages(self, handle: BaseCacheHandle) -> IntArray:
        runs = [node.pages for node in _node_of(handle).path()]
        return np.concatenate(runs[::-1]) if runs else _EMPTY

    def insert(
        self, key: PrefixKey, pages: IntArray, after: BaseCacheHandle | None = None
    ) -> InsertResult:
        first = after.num_tokens if after else 0
        num_tokens = first + len(pages) * self.page_size
        key = PrefixKey(key.namespace, key.tokens[:num_tokens])
        node, num_cached = self._walk(key, after)
        if num_cached < num_tokens:
            first_key = self._child_key(node, key, num_cached)
            new_pages = pages[(num_cached - first) // self.page_size :]
            node = self._add_leaf(node, first_key, key.tokens[num_cached:], new_pages)
        return InsertResult(_RadixHandle(num_tokens, node), num_cached)

    def lock(self, handle: BaseCacheHandle, uid: int) -> None:
        for node in _node_of(handle).path():
            if uid in node.locked_by:
                break
            if not node.locked_by:
                self._num_evictable -= len(node.pages)
            node.locked_by.add(uid)
            if len(node.locked_by) == FEWEST_IN_GROUP:
                self._shared[node] = None

    def unlock(self, handle: BaseCacheHandle, uid: int) -> None:
        for node in _node_of(handle).path():
            node.locked_by.remove(uid)
            if len(node.locked_by) == FEWEST_IN_GROUP - 1:
                del self._shared[node]
            if not node.locked_by:
                self._num_evictable += len(node.pages)
                self._order.offer(node)

    def locking_uid(self, handle: BaseCacheHandle) -> int | None:
        return next(iter(_node_of(handle).locked_by), None)

    def shared_prefixes(self) -> list[SharedPrefix]:
        within_longer = {node.parent for node in self._shared if _adds_nobody(node)}
        made: dict[_Node | None, SharedPrefix] = {}
        for shared in self._shared:
            if shared in within_longer or shared in made:
                continue
            new = list(itertools.takewhile(lambda node: node not in made, shared.path()))
            above = made.get(new[-1].parent)
            num_tokens = above.num_tokens if above else 0
            for node in reversed(new):
                num_tokens += len(node.tokens)
                if node not in within_longer:
                    above = made[node] = SharedPrefix(num_tokens, node.locked_by, above)
        return list(made.values())

    def evict(self, num_pages: int) -> IntArray:
        if num_pages > self._num_evictable:
            raise CapacityError(num_pages, self._num_evictable)
        runs = []
        while num_pages > 0:
            runs.append(self._remove_tail(self._order.pop(), num_pages))
            num_pages -= len(runs[-1])
        return np.concatenate(runs) if runs else _EMPTY

    def cut(self, handle: BaseCacheHandle, after: BaseCacheHandle) -> None:
        node = _node_of(handle)
        while node is not _node_of(after):
            assert node.is_evictable
            node = self._remove_leaf(node)

    def drop(self, handle: BaseCacheHandle) -> IntArray:
        runs = [_EMPTY]
        node = _node_of(handle)
        while node.is_evictable:
            runs.append(node.pages)
            node = self._remove_leaf(node)
        return np.concatenate(runs)

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    def _walk(self, key: PrefixKey, after: BaseCacheHandle | None) -> tuple[_Node, int]:
        """Find the longest cached prefix of a key. If it ends within an edge, split that edge.

        Edges on the way are joined where neither a branch nor a lock ends.

        Args:
            after: a prefix of the key that the cache holds; it is not compared again.

        Returns:
            the node at the end of the prefix, whose path is used now, and the prefix's length.
        """
        self._order.tick()
        self._order.drop_stale(64 + 4 * self._num_pages)
        node = self._root
        length = 0
        if after is not None:
            node = _node_of(after)
            length = after.num_tokens
        tokens = key.tokens
        run: list[_Node] = []  # each is the only child of the one before it, and none is locked
        while child := node.children.get(self._child_key(node, key, length)):
            common = self.page_size  # the child was found by these tokens
            if len(child.tokens) > common:
                common = common_prefix_length(child.tokens, tokens[length:])
                common -= common % self.page_size
            part = child if common == len(child.tokens) else self._split(child, common)
            if node.locked_by or len(node.children) > 1:
                self._join(run)
                run.clear()
            run.append(part)
            node = part
            length += common
            if node is not child:
                break
        self._join(run)
        self._order.use(node)
        return node, length

    def _child_key(self, parent: _Node, key: PrefixKey, start: int) -> bytes:
        """The bytes of the page that starts there; under the root, the namespace comes before them.

        A page has a fixed number of bytes, so the two parts of a key cannot be confused. Without a
        whole page the key is empty, which no child's key is.
        """
        page = key.tokens[start : start + self.page_size]
        if len(page) < self.page_size:
            return b""
        if parent is not self._root:
            return page.tobytes()
        return key.namespace.encode(errors="surrogatepass") + page.tobytes()

    def _split(self, node: _Node, num_tokens: int) -> _Node:
        """Cut an edge after num_tokens; returns the upper node. Handles to the lower stay valid."""
        assert node.parent is not None
        num_pages = num_tokens // self.page_size
        upper_tokens = _part(node.tokens[:num_tokens])
        upper_pages = _part(node.pages[:num_pages])
        upper = _Node(node.key, upper_tokens, upper_pages, node.parent)
        upper.locked_by = node.locked_by.copy()
        if node in self._shared:
            self._shared[upper] = None
        upper.last_used = node.last_used
        node.parent.children[node.key] = upper

        node.tokens = _part(node.tokens[num_tokens:])
        node.pages = _part(node.pages[num_pages:])
        node.key = node.tokens[: self.page_size].tobytes()
        node.parent = upper
        upper.children[node.key] = node
        return upper

    def _join(self, run: list[_Node]) -> None:
        """Make one edge of a run of edges, which were used together.

        A conversation adds an edge or two with each turn, and would be walked edge by edge. Handles
        to the last node stay valid.
        """
        if len(run) < 2:
            return
        first = run[0]
        last = run[-1]
        assert first.parent is not None
        first.parent.children[first.key] = last
        last.tokens = np.concatenate([node.tokens for node in run])
        last.pages = np.concatenate([node.pages for node in run])
        last.key = first.key
        last.parent = first.parent
        for node in run[:-1]:
            self._order.forget(node)
            node.parent = None
            node.tokens = node.pages = _EMPTY  # the order may keep the node for a while

    def _add_leaf(self, parent: _Node, key: bytes, tokens: IntArray, pages: IntArray) -> _Node:
        leaf = _Node(key, tokens.copy(), pages.copy(), parent)
        parent.children[key] = leaf
        self._num_pages += len(pages)
        self._num_evictable += len(pages)
        self._order.use(leaf)
        return leaf

    def _remove_tail(self, leaf: _Node, num_pages: int) -> IntArray:
        """Remove the last pages of a leaf, up to all of them; what remains is a shorter prefix."""
        assert leaf.parent is not None
        num_kept = max(0, len(leaf.pages) - num_pages)
        removed = leaf.pages[num_kept:]
        self._num_pages -= len(removed)
        self._num_evictable -= len(removed)
        if num_kept:
            leaf.tokens = _part(leaf.tokens[: num_kept * self.page_size])
            leaf.pages = _part(leaf.pages[:num_kept])
            self._order.offer(leaf)
        else:
            self._unlink(leaf)
        return removed

    def _remove_leaf(self, leaf: _Node) -> _Node:
        """Remove an evictable leaf before its turn; returns what was its parent."""
        self._num_pages -= len(leaf.pages)
        self._num_evictable -= len(leaf.pages)
        parent = self._unlink(leaf)
        self._order.forget(leaf)
        return parent

    def _unlink(self, leaf: _Node) -> _Node:
        """Take a leaf out of the tree; returns what was its parent."""
        assert leaf.parent is not None
        parent, leaf.parent = leaf.parent, None
        del parent.children[leaf.key]
        parent.last_used = max(parent.last_used, leaf.last_used)
        self._order.offer(parent)
        return parent

    def check_integrity(self) -> IntArray:
        runs = [_EMPTY]
        num_evictable = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                self._check_edge(node, key, child)
            if node is not self._root:
                runs.append(node.pages)
                num_evictable += 0 if node.locked_by else len(node.pages)
            assert (node in self._shared) == (len(node.locked_by) >= FEWEST_IN_GROUP)
            if node.is_evictable:
                self._order.check_integrity(node)
            stack.extend(node.children.values())
        assert num_evictable == self._num_evictable
        assert sum(map(len, runs)) == self._num_pages
        return np.concatenate(runs)

    def _check_edge(self, node: _Node, key: bytes, child: _Node) -> None:
        assert child.parent is node
        assert child.key == key
        assert key.endswith(child.tokens[: self.page_size].tobytes())
        assert len(child.tokens) == len(child.pages) * self.page_size > 0
        if node is not self._root:
            assert len(key) == self.page_size * child.tokens.itemsize
            assert child.locked_by <= node.locked_by


def _part(view: IntArray) -> IntArray:
    """What an edge keeps of its array: a copy, where a view would keep twice as much in memory.

    So an edge that shrinks page by page is copied once for each time that it has halved.
    """
    whole = view.base
    return view.copy() if whole is not None and whole.nbytes >= 2 * view.nbytes else view


def _adds_nobody(node: _Node) -> bool:
    """Whether all requests that have locked the parent of a node have locked the node, too."""
    assert node.parent is not None
    return len(node.parent.locked_by) == len(node.locked_by)


def _node_of(handle: BaseCacheHandle) -> _Node:
    assert isinstance(handle, _RadixHandle)
    return handle.node


def common_prefix_length(a: IntArray, b: IntArray) -> int:
    """Count the leading tokens that a and b have in common; both one-dimensional."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())  # 0, too, if nothing differs
    return first if differs[first] else length
