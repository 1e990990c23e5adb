"""Attention of single queries on a GPU, with the work of a step divided evenly over its warps.

The kernels take bfloat16, heads of 64 or 128 numbers, up to 8 query heads per kv head, and pages of
a multiple of 16 tokens. The host plans nothing: `plan` reads the lengths of a step on the device,
and `attend` follows that plan in each layer.

All contexts of a step, laid end to end, are cut into ranges of equal length, one for each warp
(csrc/decode_attention.cu). Pages that groups of them begin with may be left out:
`attend_shared_prefixes` attends to these, and its results are merged.

A few requests are faster with a cluster of blocks for each of their kv heads
(csrc/cluster_attention.cu). Its blocks merge the results of their warps in shared memory. The plan
says whether the contexts are short enough, and none much longer than the others.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# Q positions of a page, R rows of the tables, Z entries of a flat list.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cuda_kernels_for
from minisgl.kernel.shared_prefix import GroupTensors, PrefixParts

# As in csrc: tokens that a warp reads at a time, warps that a multiprocessor holds and that a block
# of a cluster has, and query heads per kv head.
_TILE = 16
_WARPS = 8
_MAX_GROUP = 8
_LEAST_TILES = 2  # in a range
_WIDTHS = (64, 128)
# How many blocks a cluster has, by the most clusters of a step. On an H200 of 132 processors these
# run at a time; 16 clusters of 8 blocks, or 32 of 4, do not.
_BLOCKS_OF_CLUSTER = {4: 16, 8: 8, 16: 4, 64: 2, 128: 1}
_MOST_CLUSTERS = max(_BLOCKS_OF_CLUSTER)
_MOST_TILES = 24  # that a warp of a cluster reads: from there on ranges are faster


class BalancedDecode:
    """Attention over one page table and over pools of one shape.

    A cut inside a context makes splits of it, for whose results the object holds buffers.
    `attend` must run after `plan`, on the same stream. See `create_if_supported`.
    """

    def __init__(
        self,
        kernels: Any,
        page_table_RP: Tensor,
        page_size: int,
        shape: tuple[int, int, int],
        num_ranges: int,
    ) -> None:
        num_heads, num_kv_heads, width = shape
        device = page_table_RP.device
        num_rows = len(page_table_RP)
        self._kernels = kernels
        self._page_table_RP = page_table_RP
        self._page_size = page_size
        self._num_kv_heads = num_kv_heads
        self._width = width
        self._num_ranges = num_ranges
        most_ranges = max(num_ranges, _MOST_CLUSTERS * _WARPS // num_kv_heads)

        # Laid out as `Plan` in decode_ranges.cuh: four numbers per request, eight per range.
        plan_numbers = 4 * (1 + num_rows) + 8 * most_ranges
        self._plan = torch.zeros(plan_numbers, dtype=torch.int32, device=device)

        # A range has at most two splits that are merged with others: at its start and at its end.
        num_splits = 2 * most_ranges
        self._split_outputs = torch.zeros(num_splits * num_heads * width, device=device)
        # The maximum and the sum of each row of scores.
        stats_numbers = num_splits * num_kv_heads * 2 * _MAX_GROUP
        self._split_stats = torch.zeros(stats_numbers, device=device)
        self._num_done = torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device)
        self._nothing_shared = torch.empty(0, dtype=torch.int32, device=device)
        self._leaves_out = False

    @classmethod
    def create_if_supported(
        cls, page_table_RP: Tensor, page_size: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> BalancedDecode | None:
        """Make one with a range for every warp that the device holds at a time.

        Args:
            shape: the numbers of query heads and of kv heads, and the head width.

        Returns:
            None where the kernels do not support the device, the shape, the dtype or the page size.
        """
        num_heads, num_kv_heads, width = shape
        device = page_table_RP.device
        kernels = cuda_kernels_for(torch.empty(0, dtype=dtype, device=device))
        is_supported = (
            width in _WIDTHS and num_heads <= _MAX_GROUP * num_kv_heads and page_size % _TILE == 0
        )
        if kernels is None or not is_supported:
            return None
        num_warps = torch.cuda.get_device_properties(device).multi_processor_count * _WARPS
        return cls(kernels, page_table_RP, page_size, shape, max(1, num_warps // num_kv_heads))

    def can_use_clusters(self, num_queries: int) -> bool:
        """Whether `num_queries` are few enough for clusters that the device can run."""
        if num_queries * self._num_kv_heads > _MOST_CLUSTERS:
            return False
        size = self._blocks_of_cluster(num_queries)
        num_at_once: int = self._kernels.num_decode_clusters(self._page_table_RP, self._width, size)
        return num_at_once > 0

    def plan(
        self,
        row_B: Tensor,
        position_B: Tensor,
        *,
        in_clusters: bool,
        groups: GroupTensors | None = None,
    ) -> None:
        """Divide the contexts [0, position_B[b]] of table rows row_B, on the device.

        Args:
            row_B, position_B: int32. A position of -1 marks a missing query, and all after it are
                missing, too. Nothing is written for those; in clusters there may be none.
            in_clusters: only if `can_use_clusters`; `attend` needs the same.
            groups: the plan leaves out the pages that a group shares. The contexts must be longer
                than these. `attend` then needs the result of `attend_shared_prefixes`. Not in
                clusters.
        """
        if in_clusters:
            assert groups is None
        assert len(row_B) <= len(self._page_table_RP), "buffers have a place for each row"
        num_ranges = self._num_ranges
        most_of_cluster = 0
        if in_clusters:
            num_warps = self._blocks_of_cluster(len(row_B)) * _WARPS
            num_ranges = len(row_B) * num_warps
            most_of_cluster = num_warps * _MOST_TILES
        self._leaves_out = groups is not None
        num_shared_Z = self._nothing_shared if groups is None else groups.num_shared_B
        self._kernels.plan_decode(
            position_B, row_B, num_shared_Z, self._page_size,
            num_ranges, _LEAST_TILES, most_of_cluster, self._plan,
        )  # fmt: skip

    def attend(
        self,
        q_BNH: Tensor,
        k_PQKH: Tensor,
        v_PQKH: Tensor,
        o_BNH: Tensor,
        scale: float,
        *,
        in_clusters: bool,
        starts_early: bool,
        prefix: PrefixParts | None = None,
    ) -> None:
        """Write each query's attention to its context, as it was planned.

        Args:
            q_BNH, o_BNH: the heads of a query lie side by side.
            k_PQKH, v_PQKH: pages follow each other without a gap. The kernel just before this one
                may write the last two tokens of a context: its own, and one with which another
                request of the step fills a page that both share. All other tokens must come from
                earlier kernels.
            scale: the factor of the scores.
            in_clusters: whether each request and kv head has a cluster of blocks. If the plan has
                found that this does not suit the contexts, the warps take ranges all the same.
            starts_early: whether the kernel may start while the one before it still runs. Its
                warps take all registers of the device at once, so nothing else starts after it.
            prefix: the results for the tokens that the plan leaves out; the kernel just before may
                write them. None if the plan got no groups.
        """
        assert (prefix is not None) == self._leaves_out
        size = self._num_ranges
        if in_clusters:
            attend = self._kernels.attend_in_clusters
            size = self._blocks_of_cluster(len(q_BNH))
        elif prefix is None:
            attend = self._kernels.attend_ranges
        else:
            attend = self._kernels.attend_suffixes
        attend(
            q_BNH, k_PQKH, v_PQKH, self._page_table_RP, self._plan, size,
            self._split_outputs, self._split_stats, self._num_done, o_BNH, scale, starts_early,
            *(prefix or ()),
        )  # fmt: skip

    def _blocks_of_cluster(self, num_queries: int) -> int:
        num_clusters = num_queries * self._num_kv_heads
        return next(size for most, size in _BLOCKS_OF_CLUSTER.items() if num_clusters <= most)
