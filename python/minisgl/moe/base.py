"""Contract of an MoE backend."""

# Dimension key: T tokens in the batch, D model width, F mlp width, E experts, A experts a token, X = 2 F.

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class BaseMoeBackend(ABC):
    """Runs each token through its experts and adds up."""

    @abstractmethod
    def forward(
        self,
        x_TD: Tensor,
        gate_up_EXD: Tensor,
        down_EDF: Tensor,
        weight_TA: Tensor,
        expert_TA: Tensor,
    ) -> Tensor:
        """
        Args:
            gate_up_EXD: the gate's rows over the up projection's.
            weight_TA: routing weights, x's dtype.
            expert_TA: any integer dtype, distinct within a row.

        Returns:
            [T, D], x's dtype; the sum over experts of weight * down(silu(gate(x)) * up(x)).
        """
