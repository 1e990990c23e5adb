"""Mixture of experts: how a step's tokens meet their experts.

`MoELayer` routes and holds the weights; a backend multiplies. Read `base.py`.
"""

from minisgl.moe.base import BaseMoeBackend
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.utils import Registry

MOE_BACKENDS: Registry[type[BaseMoeBackend]] = Registry("MoE backend")
MOE_BACKENDS.register("torch")(TorchMoeBackend)
MOE_BACKENDS.register("fused")(FusedMoeBackend)


def create_moe_backend(name: str) -> BaseMoeBackend:
    """Make a registered backend."""
    return MOE_BACKENDS[name]()


__all__ = [
    "MOE_BACKENDS",
    "BaseMoeBackend",
    "FusedMoeBackend",
    "TorchMoeBackend",
    "create_moe_backend",
]
