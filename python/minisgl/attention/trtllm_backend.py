"""TensorRT-LLM's kernels, which are part of FlashInfer.

XQA decodes on Hopper; trtllm-gen does prompts and decodes on Blackwell.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# R rows of the tables, T tokens of a step.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.attention.paged import PagedAttnBackend, PagedMetadata
from minisgl.checkpoint import AttentionSpec
from minisgl.core import Queries
from minisgl.errors import ConfigError
from minisgl.kvcache import MHAKVCache

_WORKSPACE_BYTES = 256 << 20
_PAGE_SIZES = (16, 32, 64, 128)


class TensorRTLLMBackend(PagedAttnBackend):
    """Attends over pages of 16 to 128 tokens."""

    supported = frozenset({"window"})

    def __init__(
        self,
        kv_pool: MHAKVCache,
        page_table_RP: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        super().__init__(kv_pool, page_table_RP, num_heads, specs)
        if self._page_size not in _PAGE_SIZES:
            raise ConfigError(
                f"--attn trtllm needs a --page-size of {_PAGE_SIZES}, got {self._page_size}"
            )
        try:
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache
            from flashinfer.prefill import trtllm_batch_context_with_kv_cache
        except ImportError as error:
            raise ConfigError(
                f"--attn trtllm needs FlashInfer: pip install 'minisgl[cuda]' ({error})"
            ) from None
        self._decode = trtllm_batch_decode_with_kv_cache
        self._prefill = trtllm_batch_context_with_kv_cache
        device = page_table_RP.device
        self.attends_prompts = torch.cuda.get_device_capability(device)[0] == 10
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,  # noqa: ARG002 - read from the pool
        v_TKH: Tensor,  # noqa: ARG002
        layer: int,
        queries: Queries,
    ) -> Tensor:
        metadata = queries.attn_metadata
        assert isinstance(metadata, PagedMetadata)
        assert metadata.length_B is not None
        spec = self._specs[layer]
        window_left = -1 if spec.window is None else spec.window - 1
        context = (
            self._pages[layer],
            self._workspace,
            metadata.page_table_BP,
            metadata.length_B.view(torch.uint32),
        )
        if metadata.max_queries == 1:
            decoded_TNH: Tensor = self._decode(
                q_TNH.contiguous(),
                *context,
                metadata.max_keys,
                bmm1_scale=spec.scale,
                bmm2_scale=1.0,
                window_left=window_left,
                kv_layout="NHD",
            )
            return decoded_TNH
        key_indptr = metadata.length_B.cumsum(0, dtype=torch.int32)
        o_TNH: Tensor = self._prefill(
            q_TNH.contiguous(),
            *context,
            metadata.max_queries,
            metadata.max_keys,
            spec.scale,
            1.0,
            len(metadata.length_B),
            metadata.query_indptr,
            torch.nn.functional.pad(key_indptr, (1, 0)),
            window_left=window_left,
            kv_layout="NHD",
        )
        return o_TNH
