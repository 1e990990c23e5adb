"""Mixture of experts: multiplies a step's tokens with the experts that they chose.

`MoELayer` routes, `ExpertBank` holds the weights, a backend multiplies. The engine chooses the
backend by device and dtype; the backend chooses its kernels, and the tiles of `tiles.py`, by the
number of tokens.

    base.py           the contract of a backend
    fused.py          Triton kernels for all experts at once
    torch_backend.py  one expert after the other in torch
    tiles.py          the tiles of a step: those that tuned/ has for the device, or a rule's

Read `base.py`.
"""

import torch

from minisgl.moe.base import BaseMoeBackend
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.tiles import (
    ExpertShape,
    TiledSteps,
    TileTable,
    expert_shape,
    find_tuned_table,
    rule_table,
    tuned_path,
    write_tuned_table,
)
from minisgl.moe.torch_backend import TorchMoeBackend


def create_moe_backend(
    device: torch.device, dtype: torch.dtype, shape: ExpertShape | None = None
) -> BaseMoeBackend:
    """Make the fastest backend for weights of a dtype on a device.

    Args:
        shape: of the experts, for which tiles may have been tuned. If absent, the rule's are used.

    Raises:
        ConfigError: the file of tuned tiles is damaged.
    """
    if not FusedMoeBackend.runs(device, dtype):
        return TorchMoeBackend()
    if shape is None:
        return FusedMoeBackend()
    return FusedMoeBackend(find_tuned_table(torch.cuda.get_device_name(device), shape), shape.ep)


__all__ = [
    "BaseMoeBackend",
    "ExpertShape",
    "FusedMoeBackend",
    "TileTable",
    "TiledSteps",
    "TorchMoeBackend",
    "create_moe_backend",
    "expert_shape",
    "find_tuned_table",
    "rule_table",
    "tuned_path",
    "write_tuned_table",
]
