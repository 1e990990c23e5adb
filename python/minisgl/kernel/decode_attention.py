"""Attention of many single queries on a GPU, with the work of a step divided evenly over its warps.

The kernels (csrc/decode_attention.cu) take bfloat16, heads of 64 or 128 numbers, up to 8 query
heads a kv head, and pages of a multiple of 16 tokens. The host plans nothing: `plan` reads the
lengths of a step on the device, and `attend` follows that plan once a layer.
"""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages,
# R rows of the tables, S kv slots.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cuda_kernels_for

_TILE = 16  # tokens that a warp reads at a time
_LEAST_TILES = 2  # in a range: to merge two splits costs as much as to read these
_WARPS = 8  # that a multiprocessor holds
_WIDTHS = (64, 128)
_MAX_GROUP = 8


class BalancedDecode:
    """Attention over one page table and over pools of one shape.

    All contexts of a step, laid end to end, are cut into ranges of equal length, one for each warp.
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
        self._num_ranges = num_ranges

        # The layout is that of `Plan` in decode_attention.cu: two numbers a range, four a request.
        plan_numbers = 4 * (num_ranges // 2 + 1 + num_rows)
        self._plan = torch.zeros(plan_numbers, dtype=torch.int32, device=device)

        # A range has at most two splits that are merged with others: at its begin and at its end.
        num_splits = 2 * num_ranges
        self._split_outputs = torch.zeros(num_splits * num_heads * width, device=device)
        # The maximum and the sum of each row of scores.
        stats_numbers = num_splits * num_kv_heads * 2 * _MAX_GROUP
        self._split_stats = torch.zeros(stats_numbers, device=device)
        self._num_done = torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device)

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

    def plan(self, row_B: Tensor, position_B: Tensor) -> None:
        """Divide the contexts [0, position_B[b]] of table rows row_B, on the device.

        Args:
            row_B, position_B: int32.
        """
        self._kernels.plan_decode(position_B, row_B, self._num_ranges, _LEAST_TILES, self._plan)

    def attend(
        self,
        q_BNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        o_BNH: Tensor,
        scale: float,
        starts_early: bool,
    ) -> None:
        """Write each query's attention to its context, as it was planned.

        Args:
            q_BNH, o_BNH: the heads of a query lie side by side.
            k_SKH, v_SKH: the kernel just before this one may write the last token of a context;
                all other tokens must come from earlier kernels.
            scale: what scores are multiplied by.
            starts_early: whether the kernel may start while the one before it still runs. Its
                warps take all registers of the device at once, so nothing else starts after it.
        """
        self._kernels.attend_ranges(
            q_BNH, k_SKH, v_SKH, self._page_table_RP, self._page_size, self._plan, self._num_ranges,
            self._split_outputs, self._split_stats, self._num_done, o_BNH, scale, starts_early,
        )  # fmt: skip
