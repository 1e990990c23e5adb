"""The way of a step's numbers from the host to the device: one copy, out of pinned memory.

The pinned buffers are used in turn, enough of them that the numbers of a step can be written while those of the step
before are still on their way; with many sends in a step, the last wait for its first. On a CPU nothing moves.
"""

# Dimension key: X numbers.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_PINNED = 40  # 256 requests that all change their logits take 35 sends, 32 requests in four
_ALIGNED = 4  # numbers: 16 bytes, so that kernels are compiled once, whatever the lengths
_NUM_LAYOUTS = 256  # that are kept, since a step mostly sends what the step before it sent
_DTYPES = {"i": torch.int32, "f": torch.float32}

Numbers = NDArray[np.int32] | NDArray[np.float32]


Layout = tuple[
    list[slice], Tensor, list[Tensor]
]  # where the arrays lie, on the device all of them, and each


class Staging:
    """Sends arrays of 4-byte numbers.

    Args:
        capacity: numbers that fit without growing. What is sent lies at the same addresses each time, as long as the
            arrays have the same lengths and fit, each rounded up to a multiple of 4.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self._device = device
        self._turn = 0
        self._pinned: list[tuple[Tensor, NDArray[np.int32], torch.cuda.Event]] = []
        self._layouts: dict[tuple[tuple[int, str], ...], Layout] = {}
        if device.type != "cpu":
            self._grow(capacity)

    def send(self, *arrays: Numbers) -> list[Tensor]:
        """The arrays as tensors on the device; on a GPU they are valid until others are sent."""
        return self.load(*arrays)()

    def load(self, *arrays: Numbers) -> Callable[[], list[Tensor]]:
        """What `send` does up to where it changes something on the device; the result, called once, does the rest."""
        if self._device.type == "cpu":
            return lambda: [torch.from_numpy(array) for array in arrays]
        key = tuple([(len(array), array.dtype.char) for array in arrays])
        places, device_X, parts = self._layouts.get(key) or self._lay_out(key)
        self._turn = (self._turn + 1) % _NUM_PINNED
        pinned_X, host_X, copied = self._pinned[self._turn]
        copied.synchronize()
        for place, array in zip(places, arrays, strict=True):
            host_X[place] = array.view(np.int32)

        def start() -> list[Tensor]:
            device_X.copy_(pinned_X[: len(device_X)], non_blocking=True)
            copied.record()
            return parts

        return start

    def _lay_out(self, key: tuple[tuple[int, str], ...]) -> Layout:
        places, end = list[slice](), 0
        for length, _ in key:
            places.append(slice(end, end + length))
            end += -(-length // _ALIGNED) * _ALIGNED
        if end > len(self._device_X):
            self._grow(2 * end)
        if len(self._layouts) == _NUM_LAYOUTS:
            self._layouts.clear()
        parts = [
            self._device_X[place].view(_DTYPES[char])
            for place, (_, char) in zip(places, key, strict=True)
        ]
        self._layouts[key] = places, self._device_X[:end], parts
        return self._layouts[key]

    def _grow(self, capacity: int) -> None:
        torch.cuda.synchronize(self._device)
        self._device_X = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        buffers = [
            torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_PINNED)
        ]
        self._pinned = [(buffer_X, buffer_X.numpy(), torch.cuda.Event()) for buffer_X in buffers]
        self._layouts.clear()
