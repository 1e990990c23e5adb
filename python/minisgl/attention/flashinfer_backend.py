"""FlashInfer (Ye et al. 2025, arXiv:2501.01005): paged attention on NVIDIA GPUs.

The decodes at the head of a plan go to our own kernels where those can take them, else to
FlashInfer's decode kernels. All other slices go to its prefill kernels (FlashAttention 3 on Hopper,
2 elsewhere); prompts that start at their first token need no pages for that. Where a step has both,
they run side by side: the last wave of tiles of prompts leaves processors idle, which decodes use.
Where our own kernels and our compilation of FlashInfer's do all of it, its Python is not imported.

How the work of FlashInfer's kernels is split over the device is planned on the host, from lengths
alone, so a plan can be made before the tokens of the step before are known. The lists of pages are
made on the device from the page table. A plan holds for layers of one `AttentionSpec`; a model
with several kinds of layers has as many plans a step. `plan` of a wrapper is FlashInfer's word for
this; what a step computes is a `BatchPlan`.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
# tables, S kv slots, T tokens of a step, X a selection out of another dimension, Z entries of a
# flat list.

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import BaseAttnBackend, CapturedSlices
from minisgl.attention.flashinfer_modules import (
    import_flashinfer,
    load_hopper_module,
    prefill_kernels,
)
from minisgl.attention.prompt_attention import (
    FlashInferPaged,
    FlashInferRagged,
    GraphRoom,
    HopperPaged,
    HopperRagged,
    PagedPrompts,
    PromptShape,
    RaggedPrompts,
    page_lists,
)
from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, Batch, BatchPlan, IntArray, PromptWaves, ReqSlice
from minisgl.kernel import BalancedDecode, attend_decode, kernels_for
from minisgl.kvcache import BaseKVCachePool

_WORKSPACE_BYTES = 256 << 20
# Requests times kv heads up to which equally many splits of each context are faster.
_FEW_HEADS = 16
# Queries that a processor takes at a time in FlashAttention 3, by the width of a head; else 128.
_TILES = {64: 192}
# Query heads a kv head for which decoding without tensor cores is faster.
_CUDA_CORE_GROUPS = (1, 2, 3)


class _PageLists(NamedTuple):
    """Where slices have their pages.

    Attributes:
        row_B: int32, on the device.
        indptr: int32 [B + 1], the offsets of the slices' lists.
        page_Z: int32, room for the lists, one after the other.
    """

    row_B: Tensor
    indptr: Tensor
    page_Z: Tensor


@dataclass(slots=True)
class _Decodes:
    """Decodes that FlashInfer computes together.

    Attributes:
        tokens: theirs, in the batch.
    """

    wrapper: Any
    tokens: slice
    page_lists: _PageLists


@dataclass(slots=True)
class _Prompts:
    """Prompts that are computed together.

    Attributes:
        tokens: theirs, in the batch. Since decodes come first and have one token each, this also
            cuts the slices of a captured graph.
        page_lists: None where the prompts' keys are just those of the batch.
    """

    attention: RaggedPrompts | PagedPrompts
    tokens: slice
    page_lists: _PageLists | None = None


@dataclass(slots=True)
class _SpecMetadata:
    """What computes a step in the layers of one spec.

    Attributes:
        num_decodes: decodes at the head of the batch that our own kernels take; 0 if a group has
            them.
        uses_splits: whether each of them is cut into as many splits (`attend_decode`), and not all
            of them into ranges of equal length (`BalancedDecode`).
        num_shared_tokens_1: int32 [1], on the device; how many leading tokens they share. None if
            a kernel does not use it.
    """

    groups: list[_Decodes | _Prompts] = field(default_factory=list)
    num_decodes: int = 0
    uses_splits: bool = False
    num_shared_tokens_1: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FlashInferMetadata(BaseAttnMetadata):
    """For each distinct spec, in the order of the backend's."""

    of_specs: list[_SpecMetadata]


class _Pool:
    """The pool, the page table and places for lists of pages, which all specs share."""

    def __init__(self, kv_pool: BaseKVCachePool, page_table_RP: Tensor, num_heads: int) -> None:
        self.page_table_RP = page_table_RP
        self.device = page_table_RP.device
        self.page_size = kv_pool.page_size
        layers = range(kv_pool.num_layers)
        self.caches = [(kv_pool.k_cache(layer), kv_pool.v_cache(layer)) for layer in layers]
        self.pages = [
            tuple(x_SKH.unflatten(0, (-1, self.page_size)) for x_SKH in cache)
            for cache in self.caches
        ]
        _, num_kv_heads, head_dim = self.caches[0][0].shape
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.dtype = self.caches[0][0].dtype
        self.graph_page_Z = torch.zeros(
            page_table_RP.numel(), dtype=torch.int32, device=self.device
        )
        self.graph_prompt_page_Z = torch.zeros_like(self.graph_page_Z)
        self.prefill_kernels = prefill_kernels(self.device)
        self.token_B = torch.arange(len(page_table_RP), dtype=torch.int32, device=self.device)
        self.prompt_stream = torch.cuda.Stream(self.device, priority=-1)

    @functools.cached_property
    def workspace(self) -> Tensor:
        """Of FlashInfer's wrappers, if there are any."""
        return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)


class _SpecAttention:
    """Attention of prompts, FlashInfer's wrapper of decodes and our own kernels, of one spec."""

    def __init__(self, pool: _Pool, spec: AttentionSpec) -> None:
        self._pool = pool
        self._spec = spec
        # Only one of our decode kernels has a window or a soft cap: the one that splits each
        # context. It takes any shape and finds all it needs on the device.
        self._needs_splits = spec.window is not None or spec.softcap is not None
        self._balanced: BalancedDecode | None = None
        if not self._needs_splits:
            self._balanced = BalancedDecode.create_if_supported(
                pool.page_table_RP, pool.page_size, pool.shape, pool.dtype
            )
        num_heads, num_kv_heads, head_dim = pool.shape
        self._use_tensor_cores = num_heads // num_kv_heads not in _CUDA_CORE_GROUPS
        self._module = load_hopper_module(pool.device, pool.dtype, head_dim, spec)
        self._shape = PromptShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=pool.page_size,
            dtype=pool.dtype,
            device=pool.device,
            spec=spec,
        )
        self._paged = self._paged_prompts(None)
        self._ragged: RaggedPrompts
        if self._module is None:
            self._ragged = FlashInferRagged(
                import_flashinfer(), pool.prefill_kernels, pool.workspace, self._shape
            )
        else:
            self._ragged = HopperRagged(self._module, self._shape)
        self._graph_prompts: dict[int, PagedPrompts] = {}  # by the number of slices

    def _paged_prompts(self, room: GraphRoom | None) -> PagedPrompts:
        if self._module is not None:
            return HopperPaged(self._module, self._shape, room)
        pool = self._pool
        return FlashInferPaged(
            import_flashinfer(), pool.prefill_kernels, pool.workspace, self._shape, room
        )

    @functools.cached_property
    def _decode(self) -> Any:
        return import_flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            self._pool.workspace, "NHD", use_tensor_cores=self._use_tensor_cores
        )

    def make_metadata(self, plan: BatchPlan) -> _SpecMetadata:
        num_decodes = plan.num_decodes
        decodes = plan.slices[:num_decodes]
        prompts = plan.slices[num_decodes:]
        metadata = _SpecMetadata()
        if self._balanced or self._needs_splits:
            metadata.num_decodes = num_decodes
            metadata.uses_splits = self._balanced is None
        elif decodes:
            wrapper = self._decode
            self._plan_decode(wrapper, _ends(decodes))
            page_lists = _PageLists(
                self._rows(decodes), wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf
            )
            metadata.groups.append(_Decodes(wrapper, slice(num_decodes), page_lists))
        if prompts:
            tokens = slice(num_decodes, None)
            metadata.groups.append(self._prompts_group(tokens, prompts))
        return metadata

    def _prompts_group(self, tokens: slice, prompts: list[ReqSlice]) -> _Prompts:
        length_B = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        if any(prompt.start for prompt in prompts):
            paged = self._paged
            paged.plan(length_B, _ends(prompts))
            return _Prompts(
                paged, tokens, _PageLists(self._rows(prompts), paged.indptr, paged.page_Z)
            )
        self._ragged.plan(length_B)
        return _Prompts(self._ragged, tokens)

    def _rows(self, slices: list[ReqSlice]) -> Tensor:
        rows = [req_slice.row for req_slice in slices]
        pinned = torch.tensor(rows, dtype=torch.int32).pin_memory()
        return pinned.to(self._pool.device, non_blocking=True)

    def make_capture_metadata(self, slices: CapturedSlices) -> _SpecMetadata:
        metadata = _SpecMetadata()
        if slices.num_decodes:
            self._add_captured_decodes(metadata, slices.decodes)
        if slices.num_prompt_tokens:
            metadata.groups.append(self._captured_prompts(slices.num_decodes, slices.prompts))
        return metadata

    def _add_captured_decodes(self, metadata: _SpecMetadata, slices: CapturedSlices) -> None:
        num_decodes = slices.num_decodes
        num_shared_tokens_1 = slices.num_shared_tokens_1
        is_few = num_decodes * self._pool.shape[1] <= _FEW_HEADS
        uses_splits = is_few or num_shared_tokens_1 is not None or self._needs_splits
        if uses_splits or self._balanced:
            metadata.num_decodes = num_decodes
            metadata.uses_splits = uses_splits
            if self._spec.window is None:
                metadata.num_shared_tokens_1 = num_shared_tokens_1
            return
        indptr = self._numbers(num_decodes + 1)
        wrapper = self._graph_decode_wrapper(num_decodes, indptr)
        page_lists = _PageLists(slices.row_X, indptr, self._pool.graph_page_Z)
        metadata.groups.append(_Decodes(wrapper, slice(num_decodes), page_lists))

    def _captured_prompts(self, num_decodes: int, slices: CapturedSlices) -> _Prompts:
        """One plan serves all graphs of as many slices and no more tokens: a replay plans anew.

        The first graph decides for how many tokens it is.
        """
        num_slices = len(slices.row_X)
        paged = self._graph_prompts.get(num_slices)
        if paged is None or not paged.room or slices.num_prompt_tokens > paged.room.num_tokens:
            room = GraphRoom(num_slices, slices.num_prompt_tokens, self._pool.graph_prompt_page_Z)
            paged = self._paged_prompts(room)
            self._graph_prompts[num_slices] = paged
        page_lists = _PageLists(slices.row_X, paged.indptr, paged.page_Z)
        return _Prompts(paged, slice(num_decodes, None), page_lists)

    def _graph_decode_wrapper(self, num_decodes: int, indptr: Tensor) -> Any:
        return import_flashinfer().CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            self._pool.workspace,
            indptr,
            self._pool.graph_page_Z,
            self._numbers(num_decodes),
            "NHD",
            use_tensor_cores=self._use_tensor_cores,
        )

    def _numbers(self, size: int) -> Tensor:
        """A place for numbers of a plan that a graph reads."""
        return torch.zeros(size, dtype=torch.int32, device=self._pool.device)

    def update_metadata(self, metadata: _SpecMetadata, start_X: IntArray, end_X: IntArray) -> None:
        for group in metadata.groups:
            start_B = start_X[group.tokens]
            end_B = end_X[group.tokens]
            if isinstance(group, _Decodes):
                self._plan_decode(group.wrapper, end_B)
            else:
                assert isinstance(group.attention, PagedPrompts), "as all that is captured"
                group.attention.plan(end_B - start_B, end_B)

    def prepare_on_device(self, batch: Batch, metadata: _SpecMetadata) -> None:
        kernels = kernels_for(self._pool.page_table_RP)
        assert kernels is not None
        if metadata.num_decodes and not metadata.uses_splits:
            assert self._balanced
            decodes = slice(metadata.num_decodes)
            self._balanced.plan(batch.row_T[decodes], batch.position_T[decodes].int())
        for group in metadata.groups:
            if group.page_lists:
                row_B, indptr, page_Z = group.page_lists
                kernels.list_pages(row_B, indptr, self._pool.page_table_RP, page_Z)

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer: int,
        batch: Batch,
        metadata: _SpecMetadata,
    ) -> Tensor:
        o_TNH = q_TNH.new_empty(q_TNH.shape)
        if metadata.num_decodes and metadata.groups:
            # Prompts before decodes, by priority: decodes go where prompts leave processors idle.
            try:
                with _fork(self._pool.prompt_stream):
                    self._run_groups(q_TNH, k_TKH, v_TKH, layer, metadata, o_TNH)
                self._attend_decodes(q_TNH, layer, batch, metadata, o_TNH)
            finally:  # also if memory is full: the next step's plan goes where prompts read theirs
                _join(self._pool.prompt_stream)
        elif metadata.num_decodes:
            self._attend_decodes(q_TNH, layer, batch, metadata, o_TNH)
        else:
            self._run_groups(q_TNH, k_TKH, v_TKH, layer, metadata, o_TNH)
        return o_TNH

    def _run_groups(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        layer: int,
        metadata: _SpecMetadata,
        o_TNH: Tensor,
    ) -> None:
        pages = self._pool.pages[layer]
        for group in metadata.groups:
            tokens = group.tokens
            if isinstance(group, _Decodes):
                group.wrapper.run(q_TNH[tokens], pages, out=o_TNH[tokens])
            elif isinstance(group.attention, PagedPrompts):
                group.attention.run(q_TNH[tokens], pages, o_TNH[tokens])
            else:
                group.attention.run(q_TNH[tokens], k_TKH[tokens], v_TKH[tokens], o_TNH[tokens])

    def _attend_decodes(
        self, q_TNH: Tensor, layer: int, batch: Batch, metadata: _SpecMetadata, o_TNH: Tensor
    ) -> None:
        pool = self._pool
        k_SKH, v_SKH = pool.caches[layer]
        decodes = slice(metadata.num_decodes)
        if not metadata.uses_splits:
            assert self._balanced
            scale = self._spec.scale
            self._balanced.attend(q_TNH[decodes], k_SKH, v_SKH, o_TNH[decodes], scale)
            return
        attend_decode(
            q_TNH,
            k_SKH,
            v_SKH,
            pool.page_table_RP,
            pool.page_size,
            pool.token_B[decodes],
            batch.row_T,
            batch.position_T,
            o_TNH,
            scale=self._spec.scale,
            window=self._spec.window,
            softcap=self._spec.softcap,
            num_shared_tokens_1=metadata.num_shared_tokens_1,
        )

    def _plan_decode(self, wrapper: Any, end_B: IntArray) -> None:
        indptr, last_page_len, num_pages = page_lists(end_B, self._pool.page_size)
        if wrapper.is_cuda_graph_enabled:  # it has a place for the pages already
            page_Z = torch.empty(0, dtype=torch.int32)
        else:  # where `prepare_on_device` lists them
            page_Z = torch.empty(num_pages, dtype=torch.int32, device=self._pool.device)
        wrapper.plan(
            indptr,
            page_Z,
            last_page_len,
            *self._pool.shape,
            self._pool.page_size,
            **self._shape.options,
        )


class FlashInferBackend(BaseAttnBackend):
    """Over a pool whose tokens have their heads side by side."""

    supported = frozenset({"window", "softcap"})
    captures_graphs = True

    def __init__(
        self,
        kv_pool: BaseKVCachePool,
        page_table_RP: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
    ) -> None:
        pool = _Pool(kv_pool, page_table_RP, num_heads)
        self.prompt_waves = _prompt_waves(pool)
        seen = [replace(spec, rope=None) for spec in specs]  # as far as attention sees it
        distinct = list(dict.fromkeys(seen))
        self._attentions = [_SpecAttention(pool, spec) for spec in distinct]
        self._index_of_layer = [distinct.index(spec) for spec in seen]
        self._planned = torch.cuda.Event()

    def make_metadata(self, plan: BatchPlan) -> FlashInferMetadata:
        self._planned.synchronize()  # until then FlashInfer's pinned memory is read
        of_specs = [attention.make_metadata(plan) for attention in self._attentions]
        self._planned.record()
        return FlashInferMetadata(of_specs)

    def make_capture_metadata(self, slices: CapturedSlices) -> FlashInferMetadata:
        of_specs = [attention.make_capture_metadata(slices) for attention in self._attentions]
        metadata = FlashInferMetadata(of_specs)
        start_X = np.zeros(len(slices.row_X), dtype=np.int32)
        end_X = np.zeros(len(slices.row_X), dtype=np.int32)
        end_X[: slices.num_decodes] = 1
        if slices.num_prompt_tokens:
            end_X[-1] = slices.num_prompt_tokens
        self.update_metadata(metadata, start_X, end_X)
        return metadata

    def update_metadata(
        self, metadata: BaseAttnMetadata, start_X: IntArray, end_X: IntArray
    ) -> None:
        assert isinstance(metadata, FlashInferMetadata)
        if not any(of_spec.groups for of_spec in metadata.of_specs):
            return
        self._planned.synchronize()
        for attention, of_spec in zip(self._attentions, metadata.of_specs, strict=True):
            attention.update_metadata(of_spec, start_X, end_X)
        self._planned.record()

    def prepare_on_device(self, batch: Batch) -> None:
        assert isinstance(batch.attn_metadata, FlashInferMetadata)
        for attention, of_spec in zip(self._attentions, batch.attn_metadata.of_specs, strict=True):
            attention.prepare_on_device(batch, of_spec)

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch
    ) -> Tensor:
        assert isinstance(batch.attn_metadata, FlashInferMetadata)
        index = self._index_of_layer[layer]
        of_spec = batch.attn_metadata.of_specs[index]
        return self._attentions[index].forward(q_TNH, k_TKH, v_TKH, layer, batch, of_spec)


def _fork(stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
    """Let the calls of a block run on another stream, after all that the current one has so far."""
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def _join(stream: torch.cuda.Stream) -> None:
    """Let the current stream go on when another has done all that it has so far."""
    torch.cuda.current_stream().wait_stream(stream)


def _prompt_waves(pool: _Pool) -> PromptWaves:
    """FlashAttention 3 gives each processor whole tiles; version 2 splits the keys of few."""
    if pool.prefill_kernels != "fa3":
        return PromptWaves()
    num_heads, _, head_dim = pool.shape
    num_processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    return PromptWaves(_TILES.get(head_dim, 128), num_heads, num_processors)


def _ends(slices: list[ReqSlice]) -> IntArray:
    return np.array([req_slice.end for req_slice in slices], dtype=np.int32)
