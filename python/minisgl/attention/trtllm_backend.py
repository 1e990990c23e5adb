"""TensorRT-LLM's kernels, as FlashInfer brings them: XQA decodes on Hopper, trtllm-gen does all on Blackwell."""

# Dimension key: T tokens in the batch, N query heads, K kv heads, H head dim.

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.attention.paged import PagedAttnBackend, PagedMetadata
from minisgl.core import Batch
from minisgl.errors import ConfigError
from minisgl.kvcache import BaseKVCachePool

_WORKSPACE_BYTES = 256 << 20
_PAGE_SIZES = (16, 32, 64, 128)


class TensorRTLLMBackend(PagedAttnBackend):
    """Over pages of 16 to 128 tokens."""

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int) -> None:
        super().__init__(kv_pool, page_table_RP, num_heads)
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
        self._decode, self._prefill = (
            trtllm_batch_decode_with_kv_cache,
            trtllm_batch_context_with_kv_cache,
        )
        device = page_table_RP.device
        self.attends_prompts = torch.cuda.get_device_capability(device)[0] == 10
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,  # noqa: ARG002 - read from the pool
        v_TKH: Tensor,  # noqa: ARG002
        layer: int,
        batch: Batch,
    ) -> Tensor:
        m = batch.attn_metadata
        assert isinstance(m, PagedMetadata) and m.length_B is not None
        q_TNH = q_TNH.contiguous()
        pages = (
            self._pages[layer],
            self._workspace,
            m.page_table_BP,
            m.length_B.view(torch.uint32),
        )
        scale = 1.0 / math.sqrt(q_TNH.shape[2])
        if m.max_queries == 1:
            o_TNH: Tensor = self._decode(
                q_TNH, *pages, m.max_keys, bmm1_scale=scale, bmm2_scale=1.0, kv_layout="NHD"
            )
        else:
            key_indptr = torch.nn.functional.pad(m.length_B.cumsum(0, dtype=torch.int32), (1, 0))
            o_TNH = self._prefill(
                q_TNH, *pages, m.max_queries, m.max_keys, scale, 1.0, len(m.length_B), m.query_indptr, key_indptr,
                kv_layout="NHD",
            )  # fmt: skip
        return o_TNH
