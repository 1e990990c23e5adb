"""The parts of FlashInfer's plans, and of ours for the same kernels: a shape, lists of pages.

A plan says how the work of a kernel is split over the device. It is made on the host, from lengths
alone, so before the tokens of the step before are known. `plan` of a wrapper is FlashInfer's word
for this; what a step computes is a `BatchPlan`.
"""

# Dimensions: B requests of a step.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.checkpoint import AttentionSpec
from minisgl.core import IntArray

_TILES_OF_PROCESSOR = 2  # which FlashInfer runs at once


class PinnedPlan:
    """A plan whose numbers go to the device from pinned memory of its own.

    The next plan must not be made before the numbers of this one are on the device.
    """

    def __init__(self) -> None:
        self._sent = torch.cuda.Event()

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """For the calls that make the next plan."""
        self._sent.synchronize()
        yield
        self._sent.record()


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attributes that the layers of one spec have in common.

    Attributes:
        num_processors: multiprocessors of the device.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    num_processors: int
    spec: AttentionSpec

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of FlashInfer's plans besides sizes."""
        return {
            "sm_scale": self.spec.scale,
            "window_left": self.window_left,
            "logits_soft_cap": self.spec.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }

    @property
    def window_left(self) -> int:
        """The window as FlashInfer counts it: positions before a token's own; -1 for no window."""
        return -1 if self.spec.window is None else self.spec.window - 1


def scratch_bytes(shape: LayerShape, tile: int, num_tiles: int = 0) -> int:
    """How much of its workspace a plan of FlashInfer's takes at most, for outputs of parts.

    Such a plan has a place for each tile of a graph. If fewer tiles than the device runs at once
    have all queries, their keys are cut into parts, each of which has a place.

    Args:
        tile: the most queries of a tile, those of all heads that share a kv head.
        num_tiles: of a graph, at most.
    """
    most_parts = _TILES_OF_PROCESSOR * shape.num_processors // shape.num_kv_heads
    num_rows = max(most_parts, num_tiles) * tile * shape.num_heads
    return num_rows * (shape.head_dim + 1) * torch.float32.itemsize


def page_lists(end_B: IntArray, page_size: int) -> tuple[Tensor, Tensor, int]:
    """indptr of the lists of pages, tokens on the last pages, pages in all; on the host, pinned."""
    indptr = page_indptr(end_B, page_size).pin_memory()
    last_page_len = torch.from_numpy((end_B - 1) % page_size + 1).pin_memory()
    return indptr, last_page_len, int(indptr[-1])


def page_indptr(end_B: IntArray, page_size: int) -> Tensor:
    """int32 [B + 1], on the host: where the lists of pages of contexts begin, and their end."""
    return running_sum(-(-end_B // page_size))


def running_sum(counts: IntArray, first: int = 0) -> Tensor:
    """int32 [B + 1] from `first` on, on the host."""
    total = np.empty(len(counts) + 1, dtype=np.int32)
    total[0] = first
    total[1:] = counts
    return torch.from_numpy(np.cumsum(total, out=total))


def ints(size: int, device: torch.device) -> Tensor:
    """A place for numbers of a plan that a graph reads."""
    return torch.zeros(size, dtype=torch.int32, device=device)
