"""The KV cache: the bytes, and which pages prompts that begin alike can share.

    base.py         the contract of a prefix cache, and the key of a prefix
    mha_pool.py     `MHAKVCache`: tensors that hold keys and values by page
    radix_cache.py  which pages hold the KV of which tokens: a radix tree
    eviction.py     which of its pages goes next
    naive_cache.py  a prefix cache that keeps nothing

A `page` is the unit of allocation, `page_size` tokens; a `slot` is one token's place,
page * page_size + offset. Neither pool nor prefix cache decides which request gets a page:
`scheduler/cache.py` does.

Read `base.py`, then `radix_cache.py` and `eviction.py`.
"""

from minisgl.kvcache.base import (
    BaseCacheHandle,
    BasePrefixCache,
    InsertResult,
    PrefixKey,
    SharedPrefix,
)
from minisgl.kvcache.mha_pool import MHAKVCache
from minisgl.kvcache.naive_cache import NaivePrefixCache
from minisgl.kvcache.radix_cache import RadixPrefixCache

# By the names in `config.py`.
PREFIX_CACHES: dict[str, type[BasePrefixCache]] = {
    "radix": RadixPrefixCache,
    "naive": NaivePrefixCache,
}


def create_prefix_cache(kind: str, page_size: int) -> BasePrefixCache:
    """Make an empty prefix cache of a kind in `PREFIX_CACHES`."""
    return PREFIX_CACHES[kind](page_size)


__all__ = [
    "PREFIX_CACHES",
    "BaseCacheHandle",
    "BasePrefixCache",
    "InsertResult",
    "MHAKVCache",
    "NaivePrefixCache",
    "PrefixKey",
    "RadixPrefixCache",
    "SharedPrefix",
    "create_prefix_cache",
]
