"""Weights without files."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


class RandomSource:
    """Random weights, made when first asked for; the same for every reader. Remembers what was read of them.

    Attributes:
        copies: of each tensor, how often each element was read.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...], **parts: range) -> Tensor:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = self.weights.setdefault(
            name, torch.randn(shape, generator=random) / shape[-1] ** 0.5
        )
        assert weight.shape == shape
        copies = self.copies.setdefault(name, torch.zeros(shape, dtype=torch.int64))
        part = tuple(
            slice(p.start, p.stop)
            for p in (parts.get("rows", range(shape[0])), *_cols(shape, parts))
        )
        copies[part] += 1
        return weight[part].clone()


def _cols(shape: tuple[int, ...], parts: dict[str, range]) -> list[range]:
    return [parts.get("cols", range(shape[1]))] if len(shape) > 1 else []
