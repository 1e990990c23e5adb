"""The common part of all sources of weights that read files.

Next to read: `safetensors_files.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from minisgl.errors import CheckpointError

# Tensors that change nothing here when they are not read: tables that are computed anew, the size
# of a packed weight, and the scales of activations and of a quantized KV cache.
_NEEDLESS_PARTS = (
    "inv_freq",
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
)


class CheckpointFiles(ABC):
    """A `WeightSource` over files. It checks presence and shape, and converts dtype and device.

    It remembers which tensors were read.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._read_names: set[str] = set()

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
        self._read_names.add(name)

    def unread_names(self) -> list[str]:
        """The tensors that no layer has read, though they may change what the model computes.

        An expert counts as read if another one of its layer is: a rank may have a few of them.
        """
        read = {_any_expert(name) for name in self._read_names}
        others = (name for name in self.names() if _any_expert(name) not in read)
        return sorted(name for name in others if name.rpartition(".")[2] not in _NEEDLESS_PARTS)

    @abstractmethod
    def names(self) -> Iterable[str]:
        """All tensors of the files."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""

    @abstractmethod
    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor: ...


def _any_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def slice_of(part: range | None) -> slice:
    """A range as a slice; None stands for the whole dimension."""
    return slice(None) if part is None else slice(part.start, part.stop)
