"""FlashAttention (Dao et al. 2022, arXiv:2205.14135).

Version 4 (CuTe DSL) runs from Ampere on, version 3 on Hopper.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# R rows of the tables, T tokens of a step.

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from minisgl.attention.paged import PagedAttnBackend, PagedMetadata
from minisgl.checkpoint import AttentionSpec
from minisgl.checkpoint.files import one_line
from minisgl.core import Queries
from minisgl.errors import ConfigError
from minisgl.kvcache import MHAKVCache


class FlashAttentionBackend(PagedAttnBackend):
    """FlashAttention 3 or 4 over the batch's own keys, or over pages.

    Prompts that begin with their first token attend to keys where the projection left them, all
    other slices to pages.
    """

    supported = frozenset({"window", "softcap"})

    def __init__(
        self,
        kv_pool: MHAKVCache,
        page_table_RP: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        super().__init__(kv_pool, page_table_RP, num_heads, specs)
        self._attend, self._attend_pages = _load()
        self._options = [_options(spec) for spec in specs]

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, queries: Queries
    ) -> Tensor:
        metadata = queries.attn_metadata
        assert isinstance(metadata, PagedMetadata)
        options = self._options[layer]
        if metadata.is_fresh:
            return self._attend(
                q_TNH,
                k_TKH,
                v_TKH,
                cu_seqlens_q=metadata.query_indptr,
                cu_seqlens_k=metadata.query_indptr,
                max_seqlen_q=metadata.max_queries,
                max_seqlen_k=metadata.max_queries,
                **options,
            )
        k_pages, v_pages = self._pages[layer]
        return self._attend_pages(q_TNH, k_pages, v_pages, metadata, options)


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """Arguments of both versions."""
    options: dict[str, Any] = {"causal": True, "softmax_scale": spec.scale}
    if spec.window is not None:
        options["window_size"] = (spec.window - 1, 0)  # before and after the query
    if spec.softcap is not None:
        options["softcap"] = spec.softcap
    return options


def _load() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Attention over the batch's own keys, and over pages.

    Raises:
        ConfigError: neither version can be imported.
    """
    versions = {
        "flash_attn.cute": _version_4,
        "flash_attn_interface": _version_3,
        "sgl_kernel.flash_attn": _version_3,
    }
    errors = []
    for module, version in versions.items():
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            errors.append(f"{module}: {one_line(error)}")
        else:
            return version(library)
    reasons = "; ".join(errors)
    raise ConfigError(f"--attn fa needs FlashAttention: pip install 'minisgl[fa]' ({reasons})")


def _version_4(library: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def attend(*qkv: Tensor, **options: Any) -> Tensor:
        output: Tensor = library.flash_attn_varlen_func(*qkv, **options)[0]
        return output

    def attend_pages(
        q_TNH: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        metadata: PagedMetadata,
        options: dict[str, Any],
    ) -> Tensor:
        return attend(
            q_TNH,
            k_pages,
            v_pages,
            cu_seqlens_q=metadata.query_indptr,
            max_seqlen_q=metadata.max_queries,
            seqused_k=metadata.length_B,
            max_seqlen_k=metadata.max_keys,
            page_table=metadata.page_table_BP,
            **options,
        )

    return attend, attend_pages


def _version_3(library: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def attend_pages(
        q_TNH: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        metadata: PagedMetadata,
        options: dict[str, Any],
    ) -> Tensor:
        output: Tensor = library.flash_attn_with_kvcache(
            q_TNH,
            k_pages,
            v_pages,
            cache_seqlens=metadata.length_B,
            page_table=metadata.page_table_BP,
            cu_seqlens_q=metadata.query_indptr,
            max_seqlen_q=metadata.max_queries,
            **options,
        )
        return output

    return library.flash_attn_varlen_func, attend_pages
