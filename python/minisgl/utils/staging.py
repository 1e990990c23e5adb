"""Copies a step's numbers from the host to the device: in one copy, out of pinned memory.

The pinned buffers are used in turn. There are enough for the host to write the numbers of a step
while those of the previous step are still being copied. A step with more copies than buffers waits
for its own first copies. On a CPU nothing is copied.
"""

# Dimensions: Z entries of a flat list.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A step in which n requests change their logits makes up to 4 + 4 * ceil(n / 32) copies out of one
# staging: 68 for 512 requests. Beside them it writes to two tables, mostly in a copy each, and
# makes one more if rows are copied.
_NUM_PINNED = 72
_ALIGNED = 4  # numbers: 16 bytes, so that kernels are compiled once, whatever the lengths
_NUM_LAYOUTS = 256  # that are kept, since a step mostly sends what the step before it sent
_DTYPES = {"i": torch.int32, "f": torch.float32}

Numbers = NDArray[np.int32] | NDArray[np.float32]
LayoutKey = tuple[tuple[int, str], ...]  # the length of each array, and the letter of its dtype


def capacity_for(*lengths: int) -> int:
    """The capacity that arrays of these lengths take together, each rounded up."""
    return sum(-(-length // _ALIGNED) * _ALIGNED for length in lengths)


class StagedCopy:
    """Arrays that are ready to be copied to the device.

    This class is for a CPU, where no copy is needed.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def start(self) -> list[Tensor]:
        """Start the copy, and return the arrays as tensors on the device. To be called once."""
        return self._tensors


class Staging:
    """Sends arrays of 4-byte numbers.

    Args:
        capacity: numbers that fit without growing; see `capacity_for`. Growing takes milliseconds,
            in which the device idles, so the capacity is that of the largest step. Until it grows,
            arrays of the same lengths always go to the same addresses.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self.capacity = capacity
        self._device = device
        self._turn = 0
        self._pinned: list[_PinnedBuffer] = []
        self._layouts: dict[LayoutKey, _Layout] = {}
        if device.type != "cpu":
            self._grow(capacity)

    def send(self, *arrays: Numbers) -> list[Tensor]:
        """The arrays as tensors on the device; on a GPU they are valid until others are sent."""
        return self.stage(*arrays).start()

    def stage(self, *arrays: Numbers) -> StagedCopy:
        """Do the host work of `send`; nothing changes on the device before `StagedCopy.start`."""
        if self._device.type == "cpu":
            return StagedCopy([torch.from_numpy(array) for array in arrays])
        layout = self._layout(arrays)
        self._turn = (self._turn + 1) % _NUM_PINNED
        pinned = self._pinned[self._turn]
        pinned.copied.synchronize()
        for part, array in zip(layout.parts, arrays, strict=True):
            pinned.array_Z[part] = array.view(np.int32)
        return _PinnedCopy(pinned, layout)

    def _layout(self, arrays: tuple[Numbers, ...]) -> _Layout:
        key = tuple([(len(array), array.dtype.char) for array in arrays])
        return self._layouts.get(key) or self._lay_out(key)

    def _lay_out(self, key: LayoutKey) -> _Layout:
        parts: list[slice] = []
        end = 0
        for length, _ in key:
            parts.append(slice(end, end + length))
            end += capacity_for(length)

        if end > len(self._device_Z):
            self._grow(2 * end)
        if len(self._layouts) == _NUM_LAYOUTS:
            self._layouts.clear()
        tensors = [
            self._device_Z[part].view(_DTYPES[char])
            for part, (_, char) in zip(parts, key, strict=True)
        ]
        layout = _Layout(parts, self._device_Z[:end], tensors)
        self._layouts[key] = layout
        return layout

    def _grow(self, capacity: int) -> None:
        self.capacity = capacity
        torch.cuda.synchronize(self._device)
        self._device_Z = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self._pinned = [_PinnedBuffer.allocate(capacity) for _ in range(_NUM_PINNED)]
        self._layouts.clear()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where arrays of certain lengths lie, in a pinned buffer and on the device.

    Attributes:
        parts: of a pinned buffer, that each array takes.
        device_Z: all of them on the device, with the gaps between them.
        tensors: each of them on the device.
    """

    parts: list[slice]
    device_Z: Tensor
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True)
class _PinnedBuffer:
    """Pinned host memory.

    Attributes:
        array_Z: the memory of `tensor_Z`.
        copied: the event at the end of the last copy out of it.
    """

    tensor_Z: Tensor
    array_Z: NDArray[np.int32]
    copied: torch.cuda.Event

    @classmethod
    def allocate(cls, capacity: int) -> _PinnedBuffer:
        tensor_Z = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        return cls(tensor_Z, tensor_Z.numpy(), torch.cuda.Event())


class FixedStaging(Staging):
    """On a CPU: arrays of the same lengths always go to the same addresses, as graphs require.

    Args:
        capacity: as above; it does not grow.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(torch.device("cpu"), capacity)
        self._device_Z = torch.zeros(capacity, dtype=torch.int32)

    def stage(self, *arrays: Numbers) -> StagedCopy:
        return _FixedCopy(self._layout(arrays), arrays)

    def _grow(self, capacity: int) -> None:
        raise AssertionError(f"{capacity} numbers would lie elsewhere than graphs read them")


class _FixedCopy(StagedCopy):
    """Arrays that `start` copies to the places of their layout."""

    def __init__(self, layout: _Layout, arrays: tuple[Numbers, ...]) -> None:
        super().__init__(layout.tensors)
        self._array_Z = layout.device_Z.numpy()
        self._parts = layout.parts
        self._arrays = arrays

    def start(self) -> list[Tensor]:
        for part, array in zip(self._parts, self._arrays, strict=True):
            self._array_Z[part] = array.view(np.int32)
        return self._tensors


def fixed_staging(device: torch.device, capacity: int) -> Staging:
    """A staging that sends arrays of the same lengths to the same addresses, up to a capacity."""
    return FixedStaging(capacity) if device.type == "cpu" else Staging(device, capacity)


class _PinnedCopy(StagedCopy):
    """Arrays in a pinned buffer."""

    def __init__(self, pinned: _PinnedBuffer, layout: _Layout) -> None:
        super().__init__(layout.tensors)
        self._pinned = pinned
        self._device_Z = layout.device_Z

    def start(self) -> list[Tensor]:
        self._device_Z.copy_(self._pinned.tensor_Z[: len(self._device_Z)], non_blocking=True)
        self._pinned.copied.record()
        return self._tensors
