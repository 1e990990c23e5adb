"""The KV bytes of multi-head (or grouped-query) attention.

On a CPU the layout is page first, [P, layer, 2, K, Q, H]. In each page, the heads of a layer lie
side by side, so attention touches few of the system's pages, and few addresses are translated. One
head's part of a page is contiguous, and is read block after block.

On a GPU the layout is layer first, and a token's heads lie side by side, [layer, 2, P, Q, K, H], as
attention kernels read it. There the pages of a layer follow each other without a gap.
"""

# Dimensions: H head width, K kv heads, P pages, Q positions of a page; 2 is keys and values.

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from minisgl.errors import ConfigError


class MHAKVCache:
    """Keys and values of every layer for `num_pages` pages.

    Slot s of the pool is position s % page_size of page s // page_size.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.page_size = page_size
        if device.type == "cpu":
            shape = (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
            layers = _zeros(shape, dtype).permute(1, 2, 0, 4, 3, 5)
        else:
            shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
            layers = torch.zeros(shape, dtype=dtype, device=device)
        self._k_PQKH: list[Tensor] = [kv_2PQKH[0] for kv_2PQKH in layers]
        self._v_PQKH: list[Tensor] = [kv_2PQKH[1] for kv_2PQKH in layers]

    @staticmethod
    def page_bytes(
        num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, itemsize: int
    ) -> int:
        """Bytes that one page takes over all layers, keys and values."""
        return 2 * num_layers * num_kv_heads * head_dim * page_size * itemsize

    def k_cache(self, layer: int) -> Tensor:
        """k_PQKH of a layer: a view, in strides that depend on the layout."""
        return self._k_PQKH[layer]

    def v_cache(self, layer: int) -> Tensor:
        """v_PQKH of a layer, in the same strides."""
        return self._v_PQKH[layer]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system provides when touched: a large pool costs nothing yet."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the KV cache would take {num_bytes:,} bytes: {error}; lower --num-pages"
        ) from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)
