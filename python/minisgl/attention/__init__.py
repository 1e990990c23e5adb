"""Attention over the paged KV cache, one backend for each kernel library.

A backend makes the metadata of a plan once a step (`make_metadata`) and attends once a layer
(`forward`). It has the `AttentionSpec` of every layer: scale, window, soft cap. `AttentionLayer`
calls it. It knows neither models nor the lives of requests.

    base.py            the contract of a backend
    torch_backend.py   a CPU; on a GPU in plain torch but for decodes
    triton_backend.py  any dtype and head width on a GPU
    fa_backend.py      FlashAttention 3 and 4
    trtllm_backend.py  TensorRT-LLM's kernels, which are part of FlashInfer
    paged.py           metadata of these two: lengths and a page table on the GPU
    hybrid_backend.py  one backend for prompts, another for decodes
    flashinfer/        FlashInfer's kernels and our own: the default on a GPU

Read `base.py`, then `torch_backend.py`.
"""

# Dimensions: P pages, R rows of the tables.

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices, group_arrays
from minisgl.attention.fa_backend import FlashAttentionBackend
from minisgl.attention.flashinfer.backend import FlashInferBackend
from minisgl.attention.flashinfer.modules import PromptModules
from minisgl.attention.hybrid_backend import HybridBackend
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.attention.triton_backend import TritonAttentionBackend
from minisgl.attention.trtllm_backend import TensorRTLLMBackend
from minisgl.checkpoint import AttentionSpec
from minisgl.config import backend_names
from minisgl.errors import ConfigError
from minisgl.kvcache import MHAKVCache

# By the names in `config.py`.
ATTENTION_BACKENDS: dict[str, type[BaseAttnBackend]] = {
    "fa": FlashAttentionBackend,
    "fi": FlashInferBackend,
    "torch": TorchAttentionBackend,
    "triton": TritonAttentionBackend,
    "trtllm": TensorRTLLMBackend,
}
_MOST_ON_GPU = 512  # numbers of a head: blocks of keys have to fit shared memory
_OPTIONAL = {"window": "a sliding window", "softcap": "a soft cap"}


def create_attention_backend(
    name: str,
    kv_pool: MHAKVCache,
    page_table_RP: Tensor,
    num_heads: int,
    specs: Sequence[AttentionSpec],
) -> BaseAttnBackend:
    """Make a backend over a pool and the page table that says which pages a request has.

    Args:
        name: what `check_attention` has accepted.
        num_heads: query heads of this rank.
        specs: the attention of each layer.

    Raises:
        ConfigError: its library is not installed, or it cannot be used so.
    """
    names = backend_names(name)
    prefill, *decode = [
        ATTENTION_BACKENDS[each](kv_pool, page_table_RP, num_heads, specs) for each in names
    ]
    if not prefill.attends_prompts:
        raise ConfigError(
            f"--attn {names[0]} only decodes on this GPU: "
            f"give another for prompts, as in fi,{names[0]}"
        )
    return HybridBackend(prefill, *decode) if decode else prefill


def check_attention(
    name: str, device: torch.device, head_dim: int, specs: Sequence[AttentionSpec]
) -> None:
    """Check that a backend can do what a model needs.

    Args:
        name: one of `ATTENTION_BACKENDS`, or one for prompts and another for decodes with a comma
            between.
        head_dim: the width of the model's heads.
        specs: the attention of each layer.

    Raises:
        ConfigError: it cannot.
    """
    if device.type == "cuda" and head_dim > _MOST_ON_GPU:
        raise ConfigError(
            f"on a GPU, heads have at most {_MOST_ON_GPU} numbers, and this model's have "
            f"{head_dim}; use --device cpu"
        )
    for each in backend_names(name):
        _check_heads(each, head_dim)
        _check_layers(each, specs)


def _check_heads(name: str, head_dim: int) -> None:
    taken = ATTENTION_BACKENDS[name].head_dims
    if taken is not None and head_dim not in taken:
        raise ConfigError(
            f"--attn {name} takes heads of {', '.join(map(str, taken))} numbers, and this model's "
            f"have {head_dim}; use --attn triton"
        )


def _check_layers(name: str, specs: Sequence[AttentionSpec]) -> None:
    for layer, spec in enumerate(specs):
        for field, need in _OPTIONAL.items():
            if getattr(spec, field) and field not in ATTENTION_BACKENDS[name].supported:
                raise ConfigError(
                    f"--attn {name} does not support {need}, "
                    f"which layer {layer} of the model needs; {_backends_with(field)}"
                )


def _backends_with(field: str) -> str:
    names = [name for name, backend in ATTENTION_BACKENDS.items() if field in backend.supported]
    return f"use {' or '.join(names)}"


__all__ = [
    "ATTENTION_BACKENDS",
    "BaseAttnBackend",
    "CapturedSlices",
    "FlashAttentionBackend",
    "FlashInferBackend",
    "HybridBackend",
    "PromptModules",
    "TensorRTLLMBackend",
    "TorchAttentionBackend",
    "TritonAttentionBackend",
    "check_attention",
    "create_attention_backend",
    "group_arrays",
]
