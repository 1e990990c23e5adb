"""Mixture of experts: which way a step's tokens are multiplied with the experts they chose.

`MoELayer` routes, `ExpertBank` holds the weights, a backend multiplies. The engine chooses the
backend by device and dtype; the backend chooses its kernels by the number of tokens. Read
`base.py`.
"""

import torch

from minisgl.moe.base import BaseMoeBackend
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.torch_backend import TorchMoeBackend

# The first that runs is taken; the last runs everywhere.
MOE_BACKENDS: tuple[type[BaseMoeBackend], ...] = (FusedMoeBackend, TorchMoeBackend)


def create_moe_backend(device: torch.device, dtype: torch.dtype) -> BaseMoeBackend:
    """Make the fastest backend for weights of a dtype on a device."""
    return next(backend() for backend in MOE_BACKENDS if backend.runs(device, dtype))


__all__ = [
    "MOE_BACKENDS",
    "BaseMoeBackend",
    "FusedMoeBackend",
    "TorchMoeBackend",
    "create_moe_backend",
]
