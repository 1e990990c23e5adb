"""One expert after the other in torch; the backend of a CPU."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel import CpuLinear, chosen_experts
from minisgl.moe.base import BaseMoeBackend


class TorchMoeBackend(BaseMoeBackend):
    """Reads only the experts that the step's tokens chose, which the host must know.

    An expert that only one token chose is multiplied as `CpuLinear` multiplies one token: in
    bfloat16 twice as fast as by oneDNN, which is best for more. Weights are not packed, because a
    copy of all experts takes too much memory.
    """

    def forward(
        self,
        x_TD: Tensor,
        gate_up_EUD: Tensor,
        down_EDF: Tensor,
        weight_TA: Tensor,
        expert_TA: Tensor,
    ) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        for expert in chosen_experts(expert_TA, len(down_EDF)):
            token, choice = (expert_TA == expert).nonzero(as_tuple=True)
            gate_up = CpuLinear(gate_up_EUD[expert], pack=False)
            down = CpuLinear(down_EDF[expert], pack=False)

            gate, up = gate_up(x_TD[token], None).chunk(2, dim=-1)
            y = down(F.silu(gate) * up, None)
            y_TD.index_add_(0, token, y * weight_TA[token, choice, None])
        return y_TD
