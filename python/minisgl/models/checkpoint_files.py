"""What all sources of weights have in common that read files.

Next to read: `safetensors_files.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from minisgl.errors import CheckpointError


class CheckpointFiles(ABC):
    """A `WeightSource` over files. It checks presence and shape, and converts dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        self._check(name, shape)
        wanted = [slice_of(rows), slice_of(cols)]
        tensor = self._read(name, tuple(wanted[: len(shape)]))
        return tensor.to(self._device, self._dtype, copy=True).contiguous()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self:
            raise CheckpointError(f"{self} has no tensor {name!r}")
        if self.shape_of(name) != shape:
            raise CheckpointError(
                f"{self}: {name!r} has the shape {self.shape_of(name)}, expected {shape}"
            )

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""

    @abstractmethod
    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor: ...


def slice_of(part: range | None) -> slice:
    """A range as a slice; None stands for the whole dimension."""
    return slice(None) if part is None else slice(part.start, part.stop)
