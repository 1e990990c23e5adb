"""Gated activations of an MLP."""

# Dimensions: F mlp width, T tokens of a step.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def silu_and_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Return silu(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202) as a new tensor.

    Rows of gate and of up may lie apart; a row is contiguous.
    """
    kernels = kernels_for(gate_TF)
    if kernels is None:
        return F.silu(gate_TF).mul_(up_TF)
    y_TF = torch.empty_like(gate_TF)
    kernels.silu_and_mul(gate_TF, up_TF, y_TF)
    return y_TF


def gelu_and_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the tanh approximation of gelu, as a new tensor."""
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)
