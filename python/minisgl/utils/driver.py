"""The driver of NVIDIA's GPUs, called without torch, which takes seconds to import."""

from __future__ import annotations

import ctypes
from typing import Any, Self

_CAPABILITY_MAJOR = 75  # of CUdevice_attribute
_CAPABILITY_MINOR = 76


class GpuDriver:
    """The GPUs that this process may use, by the same numbers as in torch.

    Args:
        library: libcuda.

    Attributes:
        num_gpus: 0 also where the driver does not work.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        count = ctypes.c_int(0)
        if library.cuInit(0) == 0:
            library.cuDeviceGetCount(ctypes.byref(count))
        self.num_gpus = count.value

    @classmethod
    def load(cls) -> Self | None:
        """Return the driver of this machine; None if there is none."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        return cls(library)

    def capability(self, gpu: int) -> tuple[int, int]:
        """Return the compute capability of a GPU that is there."""
        return self._attribute(gpu, _CAPABILITY_MAJOR), self._attribute(gpu, _CAPABILITY_MINOR)

    def _attribute(self, gpu: int, attribute: int) -> int:
        value = ctypes.c_int(0)
        device = self._device(gpu)
        self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return value.value

    def make_context(self, gpu: int) -> None:
        """Make the context that CUDA's runtime uses, too. It lives as long as the process.

        That takes up to a second, without the GIL.
        """
        context = ctypes.c_void_p()
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device(gpu))

    def _device(self, gpu: int) -> ctypes.c_int:
        device = ctypes.c_int(0)
        self._library.cuDeviceGet(ctypes.byref(device), gpu)
        return device
