"""The torch reference as a backend."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernel import moe_reference
from minisgl.moe.base import BaseMoeBackend


class TorchMoeBackend(BaseMoeBackend):
    """One expert after the other; reads only the experts that the step's tokens chose."""

    def forward(
        self,
        x_TD: Tensor,
        gate_up_EXD: Tensor,
        down_EDF: Tensor,
        weight_TA: Tensor,
        expert_TA: Tensor,
    ) -> Tensor:
        return moe_reference(x_TD, gate_up_EXD, down_EDF, weight_TA, expert_TA)
