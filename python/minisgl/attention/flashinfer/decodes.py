"""Attention of the decodes of a step, in the layers of one spec: by our kernels or FlashInfer's.

Our own kernels find all they need on the device, and take any decodes. In graphs of decodes alone
FlashInfer's wrapper, which is planned on the host, takes those for which it is faster.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, Q positions of
# a page, R rows of the tables, T tokens of a step, X a selection out of another dimension,
# Z entries of a flat list.

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from minisgl.attention.base import CapturedSlices
from minisgl.attention.flashinfer.modules import import_flashinfer
from minisgl.attention.flashinfer.plans import (
    LayerShape,
    PinnedPlan,
    ints,
    page_lists,
    scratch_bytes,
)
from minisgl.attention.flashinfer.pool import FlashInferPool
from minisgl.checkpoint import AttentionSpec
from minisgl.core import IntArray, Queries
from minisgl.kernel import (
    BalancedDecode,
    GroupTensors,
    PrefixPlan,
    attend_decode,
    attend_shared_prefixes,
    plan_shared_prefixes,
)

# Requests times kv heads up to which equally many splits of each context are faster than ranges.
_FEW_HEADS = 16
# Query heads a kv head for which decoding without tensor cores is faster.
_CUDA_CORE_GROUPS = (1, 2, 3)
_TILES = (16, 64, 128)  # how many query heads FlashInfer's tiles of decodes have room for


class DecodeKernel(Enum):
    """A kernel for decodes."""

    SPLITS = auto()  # attend_decode: each context is cut into as many splits
    RANGES = auto()  # BalancedDecode
    CLUSTERS = auto()  # BalancedDecode, in clusters


@dataclass(slots=True)
class OwnDecodes:
    """Decodes at the head of a batch that our own kernels take.

    Attributes:
        groups: those that share prefixes; None if there are none. Splits do without.
        captured: those of a graph, some of which may be missing; None for steps that are not
            captured.
        prefix_plan: how attention to what groups share is divided, once it is planned.
    """

    num_decodes: int
    kernel: DecodeKernel
    groups: GroupTensors | None = None
    captured: CapturedSlices | None = None
    prefix_plan: PrefixPlan | None = None

    def places(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """The row and the position of each, int32; -1 is the position of a missing one."""
        if self.captured is not None:
            return self.captured.row_X, self.captured.decode_position_B
        tokens = slice(self.num_decodes)
        return queries.row_X[tokens], queries.position_X[tokens]


class OwnDecodeKernels:
    """Attends with our own kernels, in the layers of one spec."""

    def __init__(self, pool: FlashInferPool, spec: AttentionSpec) -> None:
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

    def take(self, num_decodes: int, groups: GroupTensors | None) -> OwnDecodes:
        """Take the decodes of a step that is not captured."""
        kernel = DecodeKernel.RANGES if self._balanced else DecodeKernel.SPLITS
        return OwnDecodes(num_decodes, kernel, groups)

    def take_captured(self, slices: CapturedSlices) -> OwnDecodes | None:
        """Take the decodes of a graph; None if FlashInfer's kernel is faster.

        Args:
            slices: decodes alone. Beside prompts they get no clusters, since prompts leave them
                single processors.
        """
        kernel = self._kernel_for(slices)
        if kernel is None:
            return None
        return OwnDecodes(slices.num_decodes, kernel, slices.groups, slices)

    def _kernel_for(self, slices: CapturedSlices) -> DecodeKernel | None:
        num_decodes = slices.num_decodes
        if self._needs_splits:
            return DecodeKernel.SPLITS
        if self._balanced and slices.groups is not None:
            return DecodeKernel.RANGES
        can_use_clusters = self._balanced and self._balanced.can_use_clusters(num_decodes)
        if can_use_clusters and not slices.beside_prompts:
            return DecodeKernel.CLUSTERS
        if num_decodes * self._pool.shape[1] <= _FEW_HEADS:
            return DecodeKernel.SPLITS
        if self._balanced:
            return DecodeKernel.RANGES
        # FlashInfer's does not leave out missing decodes.
        return DecodeKernel.SPLITS if slices.beside_prompts else None

    def plan(self, queries: Queries, decodes: OwnDecodes) -> None:
        """Divide the work over the device, on the device, once a step."""
        if decodes.kernel is DecodeKernel.SPLITS:
            return
        assert self._balanced
        row_B, position_B = decodes.places(queries)
        if decodes.groups is not None:
            num_heads, num_kv_heads, _ = self._pool.shape
            decodes.prefix_plan = plan_shared_prefixes(
                row_B, decodes.groups, num_heads=num_heads, num_kv_heads=num_kv_heads
            )
        self._balanced.plan(
            row_B,
            position_B,
            in_clusters=decodes.kernel is DecodeKernel.CLUSTERS,
            groups=decodes.groups,
        )

    def run(
        self,
        q_TNH: Tensor,
        layer: int,
        queries: Queries,
        decodes: OwnDecodes,
        o_TNH: Tensor,
        starts_early: bool,
    ) -> None:
        """
        Args:
            starts_early: as in `BalancedDecode.attend`. Not where prompts of the step start on
                another stream: decodes would take all processors before them. So they wait for
                their stream's turn, and the prompts' stream goes first by its priority.
        """
        pool = self._pool
        pages = pool.pages[layer]
        tokens = slice(decodes.num_decodes)
        if decodes.kernel is DecodeKernel.SPLITS:
            attend_decode(
                q_TNH,
                *pages,
                pool.page_table_RP,
                pool.query_B[tokens],
                *decodes.places(queries),
                o_TNH,
                scale=self._spec.scale,
                window=self._spec.window,
                softcap=self._spec.softcap,
            )
            return
        assert self._balanced
        prefix = None
        if decodes.prefix_plan is not None:
            prefix = attend_shared_prefixes(
                q_TNH[tokens],
                *pages,
                pool.page_table_RP,
                decodes.prefix_plan,
                scale=self._spec.scale,
            )
        self._balanced.attend(
            q_TNH[tokens],
            *pages,
            o_TNH[tokens],
            self._spec.scale,
            in_clusters=decodes.kernel is DecodeKernel.CLUSTERS,
            starts_early=starts_early,
            prefix=prefix,
        )


def flashinfer_decode_bytes(shape: LayerShape, num_decodes: int) -> int:
    """How much of its workspace FlashInfer's plan of a graph of decodes takes at most.

    With tensor cores, the query heads of a kv head have tiles of their own, and a graph has a place
    for one tile less than twice the number of decodes. Without them fewer are needed.
    """
    group = shape.num_heads // shape.num_kv_heads
    tile = next((tile for tile in _TILES if tile >= group), _TILES[-1])
    num_tiles = -(-num_decodes * group // tile) + num_decodes - 1
    return scratch_bytes(shape, tile, num_tiles)


class FlashInferDecodes(PinnedPlan):
    """Attends with FlashInfer's wrapper, in graphs.

    Args:
        num_decodes: of the graph.

    Attributes:
        indptr: int32 [B + 1], on the device: the offsets of the decodes' lists of pages.
        page_Z: int32, on the device: the lists. The caller writes them between plan and run.
    """

    def __init__(self, pool: FlashInferPool, shape: LayerShape, num_decodes: int) -> None:
        super().__init__()
        self._shape = shape
        self.indptr = ints(num_decodes + 1, shape.device)
        self.page_Z = pool.graph_page_Z
        self._wrapper = import_flashinfer().CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            pool.workspace_of(flashinfer_decode_bytes(shape, num_decodes)),
            self.indptr,
            self.page_Z,
            ints(num_decodes, shape.device),
            "NHD",
            use_tensor_cores=shape.num_heads // shape.num_kv_heads not in _CUDA_CORE_GROUPS,
        )

    def plan(self, end_B: IntArray) -> None:
        """Divide the work over the device.

        Args:
            end_B: tokens of each context, that of the decode included.
        """
        shape = self._shape
        indptr, last_page_len, _ = page_lists(end_B, shape.page_size)
        no_pages = torch.empty(0, dtype=torch.int32)  # they have their place already
        with self._replaced():
            self._wrapper.plan(
                indptr, no_pages, last_page_len, *shape.heads, shape.page_size, **shape.options
            )

    def run(self, q_BNH: Tensor, pages: tuple[Tensor, Tensor], o_BNH: Tensor) -> None:
        """
        Args:
            pages: k_PQKH and v_PQKH.
        """
        self._wrapper.run(q_BNH, pages, out=o_BNH)
