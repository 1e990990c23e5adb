"""Chooses which kernels run on a tensor: compiled ones, Triton's, or none."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from minisgl.builds import CUDA_DTYPES
from minisgl.errors import ConfigError
from minisgl.kernel.native import can_load_cuda_kernels, load_cpu_kernels, load_cuda_kernels

_CPU_DTYPES = (torch.bfloat16, torch.float32, torch.int32)  # int32: of tables
_CUDA_DTYPES = tuple(getattr(torch, name) for name in CUDA_DTYPES)


def kernels_for(x: Tensor) -> Any | None:
    """Return the kernels of a tensor's device: csrc/*.cpp on a CPU, `gpu/` on a GPU.

    Returns:
        None where there are none; the caller then runs its reference.

    Raises:
        ConfigError: Triton is not installed.
    """
    return triton_kernels_for(x) if x.is_cuda else cpu_kernels_for(x)


def cpu_kernels_for(x: Tensor) -> Any | None:
    """Return the functions of csrc/*.cpp, for tensors of a CPU.

    Returns:
        None where there are none; the caller then runs its reference.
    """
    if x.is_cpu and x.dtype in _CPU_DTYPES:
        return load_cpu_kernels()
    return None


def triton_kernels_for(x: Tensor) -> Any | None:
    """Return the functions of `gpu/`, for tensors of a GPU; None for others.

    Raises:
        ConfigError: Triton is not installed.
    """
    return _gpu_kernels() if x.is_cuda else None


def cuda_kernels_for(x: Tensor) -> Any | None:
    """Return the functions of csrc/*.cu, for bfloat16 on a GPU; without nvcc only if cached.

    Returns:
        None where there are none; the caller then runs its reference.
    """
    if x.is_cuda and x.dtype in _CUDA_DTYPES:
        return load_cuda_kernels(*torch.cuda.get_device_capability(x.device))
    return None


def can_have_cuda_kernels(x: Tensor) -> bool:
    """Whether `cuda_kernels_for` finds what it needs. Unlike that, it waits for no compiler."""
    if x.is_cuda and x.dtype in _CUDA_DTYPES:
        return can_load_cuda_kernels(*torch.cuda.get_device_capability(x.device))
    return False


@functools.cache
def _gpu_kernels() -> Any:
    try:
        from minisgl.kernel import gpu
    except ImportError as error:
        raise ConfigError(f"a GPU needs Triton: pip install 'minisgl[cuda]' ({error})") from None
    return gpu
