"""Mixture of experts: the torch reference."""

# Dimension key: T tokens in the batch, D model width, F mlp width, E experts, A experts a token.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_reference(x_TD: Tensor, gate_up_EXD: Tensor, down_EDF: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        gate_up_EXD: gate over up, X = 2 F.
        weight_TA: routing weights, x's dtype.
        expert_TA: int64, the experts of each token.

    Returns:
        [T, D], x's dtype.
    """
    out_TD = torch.zeros_like(x_TD)
    for expert in expert_TA.unique().tolist():
        token, choice = (expert_TA == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TD[token], gate_up_EXD[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down_EDF[expert])
        out_TD.index_add_(0, token, y * weight_TA[token, choice, None])
    return out_TD
