"""FlashInfer (Ye et al. 2025, arXiv:2501.01005): paged attention on NVIDIA GPUs.

The decodes at the head of a plan go to our own kernels where those can take them, else to its decode kernels; all other
slices to its prefill kernels (FlashAttention 3 on Hopper, 2 elsewhere); prompts that start at their first token need no
pages for that. How the work of its kernels is split over the device is planned on the host, from lengths alone, so a
plan can be made before the tokens of the step before are known. The lists of pages are made on the device from the page
table.
"""

# Dimension key: T tokens in the batch, B slices, G requests of a graph, N query heads, K kv heads, H head dim, P pages,
# s page size, R table rows, X pages of all slices.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend
from minisgl.core import BaseAttnMetadata, Batch, BatchPlan, IntArray, ReqSlice
from minisgl.errors import ConfigError
from minisgl.kernel import BalancedDecode, attend_decode, kernels_for
from minisgl.kvcache import BaseKVCachePool

_WORKSPACE_BYTES = 256 << 20
_FEW_HEADS = (
    16  # requests times kv heads up to which programs that divide each context alike are faster
)
_CUDA_CORE_GROUPS = (
    1,
    2,
    3,
)  # query heads a kv head for which decoding without tensor cores is faster


@dataclass(slots=True)
class _Group:
    """Slices that one wrapper computes together.

    Attributes:
        rows: of the batch's tokens, those that are the slices'.
        lists: where the slices have pages: int32, on the device, the rows [B], the offsets of their lists [B + 1], and
            room for the lists [X].
    """

    wrapper: Any
    rows: slice
    lists: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(slots=True)
class FlashInferMetadata(BaseAttnMetadata):
    """What runs a step: wrappers, each with its slices, and for the decodes perhaps a kernel of our own.

    Attributes:
        num_own: decodes that it takes; 0 if they are in a group.
        shared_1: tokens that they share, on the device.
        divides_alike: each context in as many parts, instead of in parts of equal length.
    """

    groups: list[_Group] = field(default_factory=list)
    num_own: int = 0
    divides_alike: bool = False
    shared_1: Tensor | None = None


class FlashInferBackend(BaseAttnBackend):
    """Over a pool whose tokens have their heads side by side."""

    captures_graphs = True

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int) -> None:
        try:
            import flashinfer
        except ImportError as error:
            raise ConfigError(
                f"--attn fi needs FlashInfer: pip install 'minisgl[cuda]' ({error})"
            ) from None
        self._flashinfer = flashinfer
        self._page_table_RP = page_table_RP
        self._device = page_table_RP.device
        self._page_size = kv_pool.page_size
        layers = range(kv_pool.num_layers)
        self._caches = [(kv_pool.k_cache(layer), kv_pool.v_cache(layer)) for layer in layers]
        self._pages = [
            tuple(x_SKH.unflatten(0, (-1, self._page_size)) for x_SKH in pair)
            for pair in self._caches
        ]
        _, num_kv_heads, head_dim = self._caches[0][0].shape
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._dtype = self._caches[0][0].dtype
        self._own = BalancedDecode.create_if_supported(
            page_table_RP, self._page_size, self._shape, self._dtype
        )
        self._use_tensor_cores = num_heads // num_kv_heads not in _CUDA_CORE_GROUPS
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        is_hopper = torch.cuda.get_device_capability(self._device)[0] == 9
        self._kernels = "fa3" if is_hopper else "fa2"
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=self._kernels
        )
        self._ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", backend=self._kernels
        )
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._use_tensor_cores
        )
        self._no_pages = torch.empty(0, dtype=torch.int32)
        self._graph_pages_X = torch.zeros(
            page_table_RP.numel(), dtype=torch.int32, device=self._device
        )
        self._planned = torch.cuda.Event()
        self._token_B = torch.arange(len(page_table_RP), dtype=torch.int32, device=self._device)

    def prepare(self, plan: BatchPlan) -> FlashInferMetadata:
        num_decodes = plan.num_decodes
        metadata = FlashInferMetadata(num_own=num_decodes if self._own else 0)
        self._planned.synchronize()  # until then FlashInfer's pinned memory is read
        if (decodes := plan.slices[:num_decodes]) and not self._own:
            self._plan_decode(self._decode, *_page_lists(_ends(decodes), self._page_size))
            metadata.groups.append(self._group(self._decode, slice(num_decodes), decodes))
        if prompts := plan.slices[num_decodes:]:
            rest, lengths = (
                slice(num_decodes, None),
                np.array([len(part) for part in prompts], dtype=np.int32),
            )
            if all(part.start == 0 for part in prompts):
                indptr, dtypes = (
                    _running_sum(lengths),
                    {"q_data_type": self._dtype, "kv_data_type": self._dtype},
                )
                self._ragged.plan(indptr, indptr, *self._shape, causal=True, **dtypes)
                metadata.groups.append(_Group(self._ragged, rest))
            else:
                self._plan_prompts(
                    self._prefill, lengths, *_page_lists(_ends(prompts), self._page_size)
                )
                metadata.groups.append(self._group(self._prefill, rest, prompts))
        self._planned.record()
        return metadata

    def _plan_decode(
        self, wrapper: Any, indptr: Tensor, last_page_len: Tensor, num_pages: int
    ) -> None:
        dtypes = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        pages_X = self._room_for_pages(wrapper, num_pages)
        wrapper.plan(indptr, pages_X, last_page_len, *self._shape, self._page_size, **dtypes)

    def _plan_prompts(
        self,
        wrapper: Any,
        length_B: IntArray,
        indptr: Tensor,
        last_page_len: Tensor,
        num_pages: int,
    ) -> None:
        dtypes = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        queries, pages_X = _running_sum(length_B), self._room_for_pages(wrapper, num_pages)
        wrapper.plan(
            queries,
            indptr,
            pages_X,
            last_page_len,
            *self._shape,
            self._page_size,
            causal=True,
            **dtypes,
        )

    def _room_for_pages(self, wrapper: Any, num_pages: int) -> Tensor:
        """Where `begin` will list the pages; a graph's wrapper has its place already."""
        if wrapper.is_cuda_graph_enabled:
            return self._no_pages
        return torch.empty(num_pages, dtype=torch.int32, device=self._device)

    def _group(self, wrapper: Any, rows: slice, parts: list[ReqSlice]) -> _Group:
        row_B = torch.tensor([part.row for part in parts], dtype=torch.int32).pin_memory()
        row_B = row_B.to(self._device, non_blocking=True)
        return _Group(
            wrapper, rows, (row_B, wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf)
        )

    def prepare_capture(
        self, row_R: Tensor, num_tokens: int, shared_1: Tensor | None = None
    ) -> FlashInferMetadata:
        num_requests, is_prompt = len(row_R), num_tokens > len(row_R)
        is_few = num_requests * self._shape[1] <= _FEW_HEADS
        if not is_prompt and (self._own or is_few or shared_1 is not None):
            return FlashInferMetadata([], num_requests, is_few or shared_1 is not None, shared_1)
        indptr, query_indptr = torch.zeros(
            2, num_requests + 1, dtype=torch.int32, device=self._device
        ).unbind()
        last_page_len = torch.ones(num_requests, dtype=torch.int32, device=self._device)
        if is_prompt:
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", True, query_indptr, indptr, self._graph_pages_X, last_page_len,
                backend=self._kernels,
            )  # fmt: skip
        else:
            wrapper = self._flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                indptr,
                self._graph_pages_X,
                last_page_len,
                "NHD",
                use_tensor_cores=self._use_tensor_cores,
            )
        metadata = FlashInferMetadata(
            [_Group(wrapper, slice(None), (row_R, indptr, self._graph_pages_X))]
        )
        start_R = np.zeros(num_requests, dtype=np.int32)
        end_R = np.array([num_tokens - 1, 1], dtype=np.int32) if is_prompt else start_R + 1
        self.prepare_replay(metadata, start_R, end_R)
        return metadata

    def prepare_replay(
        self, metadata: BaseAttnMetadata, start_R: IntArray, end_R: IntArray
    ) -> None:
        assert isinstance(metadata, FlashInferMetadata)
        if not metadata.groups:
            return
        self._planned.synchronize()
        wrapper, lists = metadata.groups[0].wrapper, _page_lists(end_R, self._page_size)
        if isinstance(wrapper, self._flashinfer.BatchDecodeWithPagedKVCacheWrapper):
            self._plan_decode(wrapper, *lists)
        else:
            self._plan_prompts(wrapper, end_R - start_R, *lists)
        self._planned.record()

    def begin(self, batch: Batch) -> None:
        metadata = batch.attn_metadata
        assert isinstance(metadata, FlashInferMetadata)
        kernels = kernels_for(self._page_table_RP)
        assert kernels is not None
        if metadata.num_own and not metadata.divides_alike:
            assert self._own
            decodes = slice(metadata.num_own)
            self._own.plan(batch.row_T[decodes], batch.position_T[decodes].int())
        for group in metadata.groups:
            if group.lists:
                row_B, indptr, pages_X = group.lists
                kernels.list_pages(row_B, indptr, self._page_table_RP, pages_X)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch
    ) -> Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, FlashInferMetadata)
        o_TNH = q_TNH.new_empty(q_TNH.shape)
        decodes = slice(metadata.num_own)
        if metadata.divides_alike:
            attend_decode(
                q_TNH, *self._caches[layer], self._page_table_RP, self._page_size, self._token_B[decodes],
                batch.row_T, batch.position_T, o_TNH, metadata.shared_1,
            )  # fmt: skip
        elif metadata.num_own:
            assert self._own
            self._own.attend(q_TNH[decodes], *self._caches[layer], o_TNH[decodes])
        for group in metadata.groups:
            rows = group.rows
            kv = (self._pages[layer],) if group.lists else (k_TKH[rows], v_TKH[rows])
            group.wrapper.run(q_TNH[rows], *kv, out=o_TNH[rows])
        return o_TNH


def _page_lists(end_B: IntArray, page_size: int) -> tuple[Tensor, Tensor, int]:
    """indptr of the lists of pages, tokens on the last pages, pages in all; on the host, pinned."""
    num_pages_B = -(-end_B // page_size)
    last_page_len = torch.from_numpy((end_B - 1) % page_size + 1).pin_memory()
    return _running_sum(num_pages_B), last_page_len, int(num_pages_B.sum())


def _ends(parts: list[ReqSlice]) -> IntArray:
    return np.array([part.end for part in parts], dtype=np.int32)


def _running_sum(counts: IntArray) -> Tensor:
    """int32 [B + 1] from 0, pinned."""
    total = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=total[1:])
    return torch.from_numpy(total).pin_memory()
