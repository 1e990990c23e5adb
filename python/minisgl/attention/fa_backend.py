"""FlashAttention (Dao et al. 2022, arXiv:2205.14135): version 4 (CuTe DSL; from Ampere on) or 3 (Hopper)."""

# Dimension key: T tokens in the batch, N query heads, K kv heads, H head dim.

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from minisgl.attention.paged import PagedAttnBackend, PagedMetadata
from minisgl.core import Batch
from minisgl.errors import ConfigError
from minisgl.kvcache import BaseKVCachePool


class FlashAttentionBackend(PagedAttnBackend):
    """Prompts that begin with their first token attend to keys where the projection left them, others to pages."""

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int) -> None:
        super().__init__(kv_pool, page_table_RP, num_heads)
        self._attend, self._attend_pages = _load()

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch
    ) -> Tensor:
        m = batch.attn_metadata
        assert isinstance(m, PagedMetadata)
        if m.is_fresh:
            return self._attend(
                q_TNH, k_TKH, v_TKH, cu_seqlens_q=m.query_indptr, cu_seqlens_k=m.query_indptr,
                max_seqlen_q=m.max_queries, max_seqlen_k=m.max_queries, causal=True,
            )  # fmt: skip
        return self._attend_pages(q_TNH, *self._pages[layer], m)


def _load() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Attention over the batch's own keys, and over pages.

    Raises:
        ConfigError: neither version is installed.
    """
    with suppress(ImportError):
        return _version_4(importlib.import_module("flash_attn.cute"))
    for module in ("flash_attn_interface", "sgl_kernel.flash_attn"):
        with suppress(ImportError):
            return _version_3(importlib.import_module(module))
    raise ConfigError("--attn fa needs FlashAttention: pip install 'minisgl[fa]'")


def _version_4(library: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def attend(*qkv: Tensor, **options: Any) -> Tensor:
        output: Tensor = library.flash_attn_varlen_func(*qkv, **options)[0]
        return output

    def attend_pages(q_TNH: Tensor, k_pages: Tensor, v_pages: Tensor, m: PagedMetadata) -> Tensor:
        return attend(
            q_TNH, k_pages, v_pages, cu_seqlens_q=m.query_indptr, max_seqlen_q=m.max_queries,
            seqused_k=m.length_B, max_seqlen_k=m.max_keys, page_table=m.page_table_BP, causal=True,
        )  # fmt: skip

    return attend, attend_pages


def _version_3(library: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def attend_pages(q_TNH: Tensor, k_pages: Tensor, v_pages: Tensor, m: PagedMetadata) -> Tensor:
        output: Tensor = library.flash_attn_with_kvcache(
            q_TNH, k_pages, v_pages, cache_seqlens=m.length_B, page_table=m.page_table_BP,
            cu_seqlens_q=m.query_indptr, max_seqlen_q=m.max_queries, causal=True,
        )  # fmt: skip
        return output

    return library.flash_attn_varlen_func, attend_pages
