"""Gated activations."""

# Dimension key: T tokens in the batch, F mlp width.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    return F.silu(gate_TF).mul_(up_TF)


def gelu_and_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh approximation of gelu."""
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)
