"""Attention of the prompts of a step, in the layers of one spec: one plan, then a run per layer.

FlashInfer's wrappers do this, and on Hopper our own classes with our own compilation of the same
kernels. FlashInfer's Python takes a second to import, and is not needed then.
"""

# Dimensions: B requests of a step: those with prompts, H head width, K kv heads, N query heads,
# P pages, Q positions of a page, T tokens of a step, Z entries of a flat list.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.flashinfer.plans import (
    LayerShape,
    PinnedPlan,
    ints,
    page_indptr,
    page_lists,
    running_sum,
    scratch_bytes,
)
from minisgl.core import IntArray

_PLAN_BYTES = 8 << 20  # as much as FlashInfer takes
_MAX_TILE = 192  # queries
_PARTS_OF_PROCESSOR = 2  # no plan has more
_FLASHINFER_TILE = 128  # queries of all heads that share a kv head, at most


class GraphRoom(NamedTuple):
    """How many prompts a graph takes, its most tokens, and where it reads the prompts' pages."""

    num_prompts: int
    num_tokens: int
    page_Z: Tensor


def flashinfer_prompt_bytes(shape: LayerShape, room: GraphRoom | None = None) -> int:
    """How much of its workspace FlashInfer's plan of prompts takes at most.

    That of a graph has a place for each tile, and for one tile more of each prompt.
    """
    num_tiles = 0
    if room is not None:
        group = shape.num_heads // shape.num_kv_heads
        num_tiles = -(-room.num_tokens * group // _FLASHINFER_TILE) + room.num_prompts
    return scratch_bytes(shape, _FLASHINFER_TILE, num_tiles)


class PromptParts(NamedTuple):
    """Where the results of parts of the keys lie, until those of a tile of queries are joined.

    Layers and steps use them one after the other. The layout is that of `Parts` in hopper/sizes.h,
    whose tiles may have fewer queries than there is room for.

    Attributes:
        outputs: float32 [parts * queries * H], on the device.
        logs: float32 [parts * queries], logarithms to base 2 of the sums of weights.
        num_done: int32 [parts], how many parts of a tile are there; zeros between launches.
    """

    outputs: Tensor
    logs: Tensor
    num_done: Tensor

    @classmethod
    def on(cls, device: torch.device, head_dim: int) -> PromptParts:
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_parts = _PARTS_OF_PROCESSOR * num_processors
        return cls(
            torch.empty(num_parts * _MAX_TILE * head_dim, device=device),
            torch.empty(num_parts * _MAX_TILE, device=device),
            ints(num_parts, device),
        )


class RaggedPrompts(ABC):
    """Attends for prompts whose keys are just those of the batch."""

    @abstractmethod
    def plan(self, length_B: IntArray) -> None:
        """Divide the work over the device.

        Args:
            length_B: tokens of each prompt.
        """

    @abstractmethod
    def run(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, o_TNH: Tensor) -> None: ...


class PagedPrompts(ABC):
    """Attends for prompts whose keys are partly or wholly in pages of the pool.

    Attributes:
        indptr: int32 [B + 1], on the device: the offsets of the prompts' lists of pages.
        page_Z: int32, on the device: the lists. The caller writes them between plan and run.
        room: what a graph takes; None for steps that are not captured.
    """

    indptr: Tensor
    page_Z: Tensor
    room: GraphRoom | None

    @abstractmethod
    def plan(self, length_B: IntArray, end_B: IntArray, num_decodes: int = 0) -> None:
        """Divide the work over the device.

        Args:
            length_B: tokens of each prompt's slice.
            end_B: tokens of its context, the slice included.
            num_decodes: tokens before the prompts, in a graph.
        """

    @abstractmethod
    def run(self, q_TNH: Tensor, pages: tuple[Tensor, Tensor], o_TNH: Tensor) -> None:
        """
        Args:
            pages: k_PQKH and v_PQKH.
        """


class FlashInferRagged(PinnedPlan, RaggedPrompts):
    """Attends with FlashInfer's wrapper.

    Args:
        backend: FlashInfer's name of its kernels.
        workspace: uint8, on the device.
    """

    def __init__(self, flashinfer: Any, backend: str, workspace: Tensor, shape: LayerShape) -> None:
        super().__init__()
        self._shape = shape
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", backend=backend
        )

    def plan(self, length_B: IntArray) -> None:
        indptr = running_sum(length_B).pin_memory()
        shape = self._shape
        with self._replaced():
            self._wrapper.plan(indptr, indptr, *shape.heads, causal=True, **shape.options)

    def run(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, o_TNH: Tensor) -> None:
        self._wrapper.run(q_TNH, k_TKH, v_TKH, out=o_TNH)


class FlashInferPaged(PinnedPlan, PagedPrompts):
    """Attends with FlashInfer's wrapper.

    The wrapper's tokens begin with the first. So in a graph the decodes before the prompts are to
    it a prompt without keys, and it writes zeros for them.

    Args:
        backend: FlashInfer's name of its kernels.
        workspace: uint8, on the device.
    """

    def __init__(
        self,
        flashinfer: Any,
        backend: str,
        workspace: Tensor,
        shape: LayerShape,
        room: GraphRoom | None = None,
    ) -> None:
        super().__init__()
        self._shape = shape
        self.room = room
        places: dict[str, Any] = {}
        if room is not None:
            num_slices = 1 + room.num_prompts
            places = {
                "use_cuda_graph": True,
                "qo_indptr_buf": ints(num_slices + 1, shape.device),
                "paged_kv_indptr_buf": ints(num_slices + 1, shape.device),
                "paged_kv_indices_buf": room.page_Z,
                "paged_kv_last_page_len_buf": ints(num_slices, shape.device),
            }
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend=backend, **places
        )
        if room is not None:
            self.indptr = places["paged_kv_indptr_buf"][1:]
            self.page_Z = room.page_Z

    def plan(self, length_B: IntArray, end_B: IntArray, num_decodes: int = 0) -> None:
        shape = self._shape
        if self.room is not None:
            length_B = np.insert(length_B, 0, num_decodes)
            end_B = np.insert(end_B, 0, 0)
        indptr, last_page_len, num_pages = page_lists(end_B, shape.page_size)
        if self.room is None:
            page_Z = torch.empty(num_pages, dtype=torch.int32, device=shape.device)
        else:
            page_Z = torch.empty(0, dtype=torch.int32)  # it has its place already
        with self._replaced():
            self._wrapper.plan(
                running_sum(length_B).pin_memory(),
                indptr,
                page_Z,
                last_page_len,
                *shape.heads,
                shape.page_size,
                causal=True,
                **shape.options,
            )
        if self.room is None:
            self.indptr = self._wrapper._paged_kv_indptr_buf
            self.page_Z = self._wrapper._paged_kv_indices_buf

    def run(self, q_TNH: Tensor, pages: tuple[Tensor, Tensor], o_TNH: Tensor) -> None:
        self._wrapper.run(q_TNH, pages, out=o_TNH)


class _HopperPlan(PinnedPlan):
    """A plan of our kernels."""

    _has_pages: ClassVar[bool]

    def __init__(self, module: Any, shape: LayerShape) -> None:
        super().__init__()
        self._module = module
        self._shape = shape
        self._numbers = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=shape.device)
        self._pinned_numbers = torch.empty(_PLAN_BYTES, dtype=torch.uint8).pin_memory()
        self._places: Any = None

    def _plan(
        self,
        length_B: IntArray,
        kv_indptr: Tensor,
        end_B: IntArray,
        room: GraphRoom | None = None,
        num_decodes: int = 0,
        max_parts: int = 0,
    ) -> None:
        shape = self._shape
        with self._replaced():
            self._places = self._module.plan(
                self._numbers,
                self._pinned_numbers,
                running_sum(length_B, first=num_decodes),
                kv_indptr,
                torch.from_numpy(np.ascontiguousarray(end_B)),
                int(length_B.sum()) if room is None else room.num_tokens,
                shape.num_heads,
                shape.num_kv_heads,
                shape.page_size,
                shape.window_left,
                self._has_pages,
                room is not None,
                max_parts,
            )

    def _kv_indptr(self, num_prompts: int) -> Tensor:
        """That of a plan of so many prompts, on the device: with it the plan's memory begins."""
        return self._numbers[: 4 * (num_prompts + 1)].view(torch.int32)

    def _scores(self) -> tuple[int, float, float]:
        spec = self._shape.spec
        return self._shape.window_left, spec.softcap or 0.0, spec.scale


class HopperRagged(_HopperPlan, RaggedPrompts):
    """Attends with our compilation of FlashAttention 3.

    Args:
        module: the functions of the library that `PromptKernels.library` describes.
    """

    _has_pages = False

    def plan(self, length_B: IntArray) -> None:
        self._plan(length_B, running_sum(length_B), length_B)

    def run(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, o_TNH: Tensor) -> None:
        self._module.ragged_run(
            self._numbers, self._places, q_TNH, k_TKH, v_TKH, o_TNH, *self._scores()
        )


class HopperPaged(_HopperPlan, PagedPrompts):
    """Attends with our compilation of FlashAttention 3.

    Args:
        module: the functions of the library that `PromptKernels.library` describes.
        parts: without a window, a tile is cut into parts of its keys where that ends sooner.
    """

    _has_pages = True

    def __init__(
        self, module: Any, shape: LayerShape, parts: PromptParts, room: GraphRoom | None = None
    ) -> None:
        super().__init__(module, shape)
        self.room = room
        self._parts = parts
        if room is not None:
            self.indptr = self._kv_indptr(room.num_prompts)
            self.page_Z = room.page_Z

    def plan(self, length_B: IntArray, end_B: IntArray, num_decodes: int = 0) -> None:
        shape = self._shape
        indptr = page_indptr(end_B, shape.page_size)
        max_parts = len(self._parts.num_done)
        self._plan(length_B, indptr, end_B, self.room, num_decodes, max_parts)
        if self.room is None:
            self.indptr = self._kv_indptr(len(length_B))
            self.page_Z = torch.empty(int(indptr[-1]), dtype=torch.int32, device=shape.device)

    def run(self, q_TNH: Tensor, pages: tuple[Tensor, Tensor], o_TNH: Tensor) -> None:
        self._module.paged_run(
            self._numbers,
            self._places,
            q_TNH,
            *pages,
            self.page_Z,
            o_TNH,
            *self._scores(),
            *self._parts,
        )
