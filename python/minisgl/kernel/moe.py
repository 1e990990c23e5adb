"""Mixture of experts: routes tokens to experts; the reference for the experts' products."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp: 2 F.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import triton_kernels_for


def route(
    logits_TE: Tensor, num_chosen: int, normalize: bool, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Choose for each token the A experts that rank first in its softmax.

    Args:
        normalize: whether the weights of a token are scaled to sum to one.
        first: the expert that gets the number 0, where experts before it are on other ranks.

    Returns:
        weight_TA: computed in float32, in the dtype of the logits.
        expert_TA: int32, in [-first, E - first).
    """
    kernels = triton_kernels_for(logits_TE)
    if kernels is None:
        return route_reference(logits_TE, num_chosen, normalize, first)
    weight_TA = logits_TE.new_empty(len(logits_TE), num_chosen)
    expert_TA = torch.empty_like(weight_TA, dtype=torch.int32)
    kernels.route(logits_TE, weight_TA, expert_TA, normalize, first)
    return weight_TA, expert_TA


def route_reference(
    logits_TE: Tensor, num_chosen: int, normalize: bool, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute what `route` does, in plain torch."""
    probability_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    weight_TA, expert_TA = probability_TE.topk(num_chosen, dim=-1)
    if normalize:
        weight_TA = weight_TA / weight_TA.sum(dim=-1, keepdim=True)
    return weight_TA.to(logits_TE.dtype), (expert_TA - first).int()


def chosen_experts(expert_TA: Tensor, num_experts: int) -> list[int]:
    """The experts in [0, num_experts) that some token chose; the host waits for the device."""
    return [expert for expert in expert_TA.unique().tolist() if 0 <= expert < num_experts]


def moe_reference(
    x_TD: Tensor, gate_up_EUD: Tensor, down_EDF: Tensor, weight_TA: Tensor, expert_TA: Tensor
) -> Tensor:
    """The contract of `moe/base.py` in plain torch, with which every backend is compared.

    It takes one expert after the other, and reads only those that some token chose.
    """
    out_TD = torch.zeros_like(x_TD)
    for expert in chosen_experts(expert_TA, len(down_EDF)):
        token, choice = (expert_TA == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TD[token], gate_up_EUD[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down_EDF[expert])
        out_TD.index_add_(0, token, y * weight_TA[token, choice, None])
    return out_TD
