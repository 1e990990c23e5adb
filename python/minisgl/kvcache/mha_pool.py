"""The KV bytes of multi-head (or grouped-query) attention.

On a CPU the layout is head first, [layer, 2, K, S, H]: a page of one head is memory in one piece,
which its attention reads block after block. On a GPU it is token first, [layer, 2, S, K, H], as
attention kernels read it.
"""

# Dimensions: H head width, K kv heads, S kv slots; 2 is keys and values.

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from minisgl.errors import ConfigError


class MHAKVCache:
    """Keys and values of every layer for num_pages * page_size slots."""

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
        num_slots = num_pages * page_size
        if device.type == "cpu":
            head_first = _zeros((num_layers, 2, num_kv_heads, num_slots, head_dim), dtype)
            layers = head_first.transpose(2, 3)
        else:
            layers = torch.zeros(
                num_layers, 2, num_slots, num_kv_heads, head_dim, dtype=dtype, device=device
            )
        self._k_SKH: list[Tensor] = [kv_2SKH[0] for kv_2SKH in layers]
        self._v_SKH: list[Tensor] = [kv_2SKH[1] for kv_2SKH in layers]

    @staticmethod
    def page_bytes(
        num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, itemsize: int
    ) -> int:
        """Bytes that one page takes over all layers, keys and values."""
        return 2 * num_layers * num_kv_heads * head_dim * page_size * itemsize

    def k_cache(self, layer: int) -> Tensor:
        """k_SKH of a layer: a view, in strides that depend on the layout."""
        return self._k_SKH[layer]

    def v_cache(self, layer: int) -> Tensor:
        """v_SKH of a layer, in the same strides."""
        return self._v_SKH[layer]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system provides when touched: a large pool costs nothing yet.

    It provides small pages. New tokens are written to all heads of all layers, which lie far apart.
    With huge pages of 2 MiB, the first token beyond each of them would wait until the system has
    cleared hundreds of those. That is a quarter of a second for a model of 30 layers.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the KV cache would take {num_bytes:,} bytes: {error}; lower --num-pages"
        ) from None
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
