"""The way of a step's numbers from the host to the device: one copy, out of pinned memory.

The pinned buffers are used in turn, enough of them that the numbers of a step can be written while all those of the
step before are still on their way. On a CPU nothing moves.
"""

# Dimension key: X numbers.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_PINNED = 16
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class Staging:
    """Sends arrays of 4-byte numbers.

    Args:
        capacity: numbers that fit without growing. What is sent lies at the same addresses each time, as long as the
            arrays have the same lengths and fit.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self._device = device
        self._turn = 0
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        if device.type != "cpu":
            self._grow(capacity)

    def send(self, *arrays: NDArray[np.int32] | NDArray[np.float32]) -> list[Tensor]:
        """The arrays as tensors on the device; on a GPU they are valid until the next `send`."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        total = sum(len(array) for array in arrays)
        if total > len(self._device_X):
            self._grow(2 * total)
        self._turn = (self._turn + 1) % _NUM_PINNED
        host_X, copied = self._pinned[self._turn]
        copied.synchronize()
        np.concatenate([array.view(np.int32) for array in arrays], out=host_X.numpy()[:total])
        self._device_X[:total].copy_(host_X[:total], non_blocking=True)
        copied.record()
        parts = self._device_X[:total].split([len(array) for array in arrays])
        return [part.view(_DTYPES[array.dtype]) for part, array in zip(parts, arrays, strict=True)]

    def _grow(self, capacity: int) -> None:
        torch.cuda.synchronize(self._device)
        self._device_X = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self._pinned = [
            (torch.empty(capacity, dtype=torch.int32, pin_memory=True), torch.cuda.Event()) for _ in range(_NUM_PINNED)
        ]
