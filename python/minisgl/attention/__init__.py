"""Attention over the paged KV cache, one backend for each kernel library.

A backend turns a plan into metadata once a step (`prepare`) and attends once a layer (`forward`). `AttentionLayer`
calls it; it knows neither models nor requests' lives. Read `base.py`, then `torch_backend.py`.
"""

from collections.abc import Callable

from torch import Tensor

from minisgl.attention.base import BaseAttnBackend
from minisgl.attention.fa_backend import FlashAttentionBackend
from minisgl.attention.flashinfer_backend import FlashInferBackend
from minisgl.attention.hybrid_backend import HybridBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.attention.trtllm_backend import TensorRTLLMBackend
from minisgl.config import backend_names
from minisgl.core import BaseAttnMetadata
from minisgl.errors import ConfigError
from minisgl.kvcache import BaseKVCachePool
from minisgl.utils import Registry

ATTENTION_BACKENDS: Registry[Callable[[BaseKVCachePool, Tensor, int], BaseAttnBackend]] = Registry(
    "attention backend"
)
ATTENTION_BACKENDS.register("torch")(TorchAttentionBackend)
ATTENTION_BACKENDS.register("fi")(FlashInferBackend)
ATTENTION_BACKENDS.register("fa")(FlashAttentionBackend)
ATTENTION_BACKENDS.register("trtllm")(TensorRTLLMBackend)


def create_attention_backend(
    name: str, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int
) -> BaseAttnBackend:
    """Make a backend over a pool and the page table that says who has which of its pages.

    Args:
        name: a registered name, or one for prompts and another for decodes with a comma between.
        num_heads: query heads of this rank.

    Raises:
        ConfigError: its library is not installed, or it cannot be used so.
    """
    names = backend_names(name)
    prefill, *decode = [
        ATTENTION_BACKENDS[part](kv_pool, page_table_RP, num_heads) for part in names
    ]
    if not prefill.attends_prompts:
        raise ConfigError(
            f"--attn {names[0]} only decodes on this GPU: give another for prompts, as in fi,{names[0]}"
        )
    return HybridBackend(prefill, *decode) if decode else prefill


__all__ = [
    "ATTENTION_BACKENDS",
    "BaseAttnBackend",
    "BaseAttnMetadata",
    "FlashAttentionBackend",
    "FlashInferBackend",
    "HybridBackend",
    "TensorRTLLMBackend",
    "TorchAttentionBackend",
    "create_attention_backend",
]
