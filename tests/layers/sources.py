"""Weights without files."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


class RandomSource:
    """Random weights that depend on their names alone. It counts what is read.

    Attributes:
        weights: by name, in full.
        reads: of each tensor, how often each element was read.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.reads: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        """False: what a checkpoint may leave out is left out."""
        return False

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = self.weights.setdefault(
            name, torch.randn(shape, generator=random) / shape[-1] ** 0.5
        )
        assert weight.shape == shape
        reads = self.reads.setdefault(name, torch.zeros(shape, dtype=torch.int64))
        asked = [rows, cols][: len(shape)]
        shard = tuple(slice(r.start, r.stop) if r is not None else slice(None) for r in asked)
        reads[shard] += 1
        return weight[shard].clone()
