"""Helpers of the prefix-cache tests: sequences, and a prefix cache that is a dictionary."""

from __future__ import annotations

import numpy as np

from minisgl.core import IntArray
from minisgl.kvcache import BaseCacheHandle, BasePrefixCache, PrefixKey

Tokens = tuple[int, ...]
Prefix = tuple[str, Tokens]  # a namespace, and tokens


def key_of(prefix: Prefix) -> PrefixKey:
    namespace, tokens = prefix
    return PrefixKey(namespace, np.array(tokens, dtype=np.int32))


def key_of_pages(letters: str, page_size: int, namespace: str = "") -> PrefixKey:
    return PrefixKey(namespace, whole_pages(letters, page_size))


def whole_pages(first_tokens: str, page_size: int) -> IntArray:
    """One page for each letter: equal letters, equal pages."""
    return np.array(
        [ord(letter) * 100 + i for letter in first_tokens for i in range(page_size)], dtype=np.int32
    )


class PageDict:
    """What a prefix cache must do: one entry a page, by namespace and the tokens up to its end.

    Each entry says when it was last used.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page: dict[Prefix, int] = {}
        self.last_used: dict[Prefix, int] = {}
        self.locked: list[Prefix] = []
        self._clock = 0

    def prefixes(self, whole: Prefix) -> list[Prefix]:
        """The whole pages of a sequence, each as the tokens up to its end."""
        namespace, tokens = whole
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tokens[:end]) for end in ends]

    def use(self, whole: Prefix) -> int:
        """Find the longest cached prefix; its length."""
        self._clock += 1
        found = [prefix for prefix in self.prefixes(whole) if prefix in self.page]
        self.last_used.update(dict.fromkeys(found, self._clock))
        return len(found) * self.page_size

    def insert(self, whole: Prefix, pages: list[int]) -> int:
        num_cached = self.use(whole)
        for prefix, page in zip(self.prefixes(whole), pages, strict=True):
            self.page.setdefault(prefix, page)
            self.last_used[prefix] = self._clock
        return num_cached

    def unlocked(self) -> set[Prefix]:
        held = {prefix for whole in self.locked for prefix in self.prefixes(whole)}
        return self.page.keys() - held

    def evict(self) -> int:
        """Take out the page that was used longest ago, of unlocked ones that none comes after.

        There is one such page: those that were last used together are prefixes of each other.
        """
        before_others = {(name, tokens[: -self.page_size]) for name, tokens in self.page}
        ends = self.unlocked() - before_others
        oldest = min(ends, key=self.last_used.__getitem__)
        del self.last_used[oldest]
        return self.page.pop(oldest)

    def drop(self, whole: Prefix) -> list[int]:
        """Take out the last pages of a prefix, until one is locked or another comes after it."""
        dropped: list[int] = []
        for prefix in reversed(self.prefixes(whole)):
            before_others = {(name, tokens[: -self.page_size]) for name, tokens in self.page}
            if prefix in before_others or prefix not in self.unlocked():
                break
            del self.last_used[prefix]
            dropped.append(self.page.pop(prefix))
        return dropped

    def pages_of(self, whole: Prefix) -> list[int]:
        return [self.page[prefix] for prefix in self.prefixes(whole)]

    def remove(self, pages: list[int]) -> None:
        """Take out the prefixes of these pages."""
        for prefix in [prefix for prefix, page in self.page.items() if page in pages]:
            del self.page[prefix], self.last_used[prefix]


def snapshot(cache: BasePrefixCache, handles: list[BaseCacheHandle]) -> tuple[object, ...]:
    """What can be seen of a cache from outside."""
    held = sorted(cache.check_integrity().tolist())
    return (
        held,
        cache.num_evictable,
        [cache.pages(handle).tolist() for handle in handles],
    )
