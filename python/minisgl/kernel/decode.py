"""Attention of many single queries on a GPU, with the work of a step divided evenly over it (csrc/attention.cu).

For bfloat16, heads of 64 or 128 numbers, up to 8 query heads a kv head, and pages of a multiple of 16 tokens. Nothing
is planned on the host: `plan` reads the lengths of a step on the device, and `attend` follows that plan once a layer.
"""

# Dimension key: B queries, N query heads, K kv heads, H head dim, S kv slots, R table rows, P pages.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cuda_kernels_for

_TILE = 16  # tokens
_LEAST_TILES = 2  # in a part of a context: joining parts costs as much as reading these
_WARPS = 8  # that a processor holds
_WIDTHS = (64, 128)
_MAX_GROUP = 8


class BalancedDecode:
    """Attention over one page table and pools of one shape, with room for the parts of divided contexts. See `of`."""

    def __init__(
        self,
        kernels: Any,
        page_table_RP: Tensor,
        page_size: int,
        shape: tuple[int, int, int],
        num_ranges: int,
    ) -> None:
        num_heads, num_kv_heads, width = shape
        device, num_rows = page_table_RP.device, len(page_table_RP)
        self._kernels, self._page_table_RP, self._page_size = kernels, page_table_RP, page_size
        self._num_ranges = num_ranges
        self._plan = torch.zeros(
            4 * (self._num_ranges // 2 + 1 + num_rows), dtype=torch.int32, device=device
        )
        self._part = torch.zeros(2 * self._num_ranges * num_heads * width, device=device)
        self._part_top = torch.zeros(
            2 * self._num_ranges * num_kv_heads * 2 * _MAX_GROUP, device=device
        )
        self._num_done = torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device)

    @classmethod
    def of(
        cls, page_table_RP: Tensor, page_size: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> BalancedDecode | None:
        """For queries and a pool of this shape (query heads, kv heads, width) and dtype; None if they do not fit."""
        num_heads, num_kv_heads, width = shape
        device = page_table_RP.device
        kernels = cuda_kernels_for(torch.empty(0, dtype=dtype, device=device))
        fits = (
            width in _WIDTHS and num_heads <= _MAX_GROUP * num_kv_heads and page_size % _TILE == 0
        )
        if kernels is None or not fits:
            return None
        num_warps = torch.cuda.get_device_properties(device).multi_processor_count * _WARPS
        return cls(kernels, page_table_RP, page_size, shape, max(1, num_warps // num_kv_heads))

    def plan(self, row_B: Tensor, position_B: Tensor) -> None:
        """Divide the contexts [0, position_B[b]] of table rows row_B; both int32, and read on the device."""
        self._kernels.plan_decode(position_B, row_B, self._num_ranges, _LEAST_TILES, self._plan)

    def attend(self, q_BNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, o_BNH: Tensor) -> None:
        """Write each query's attention to its context, as it was planned.

        Args:
            q_BNH, o_BNH: the heads of a query lie side by side.
            k_SKH, v_SKH: the last token of a context may be written by the kernel just before this one, the others not.
        """
        self._kernels.attend_ranges(
            q_BNH, k_SKH, v_SKH, self._page_table_RP, self._page_size, self._plan, self._num_ranges, self._part,
            self._part_top, self._num_done, o_BNH,
        )  # fmt: skip
