"""Attention over the paged KV cache, one backend for each kernel library.

A backend turns a plan into metadata once a step (`prepare`) and attends once a layer (`forward`). `AttentionLayer`
calls it; it knows neither models nor requests' lives. Read `base.py`, then `torch_backend.py`.
"""

from collections.abc import Callable

from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, BaseAttnMetadata
from minisgl.attention.flashinfer_backend import FlashInferBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.kvcache import BaseKVCachePool
from minisgl.utils import Registry

ATTENTION_BACKENDS: Registry[Callable[[BaseKVCachePool, Tensor, int], BaseAttnBackend]] = Registry("attention backend")
ATTENTION_BACKENDS.register("torch")(TorchAttentionBackend)
ATTENTION_BACKENDS.register("fi")(FlashInferBackend)


def create_attention_backend(
    name: str, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int
) -> BaseAttnBackend:
    """Make a registered backend over a pool and the page table that says who has which of its pages.

    Args:
        num_heads: query heads of this rank.
    """
    return ATTENTION_BACKENDS[name](kv_pool, page_table_RP, num_heads)


__all__ = [
    "ATTENTION_BACKENDS",
    "BaseAttnBackend",
    "BaseAttnMetadata",
    "FlashInferBackend",
    "TorchAttentionBackend",
    "create_attention_backend",
]
