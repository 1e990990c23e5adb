"""Contract of an MoE backend."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp.

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class BaseMoeBackend(ABC):
    """Runs each token through its experts and sums their weighted outputs."""

    def nums_of_tokens(self, num_experts: int, each: int) -> list[int]:  # noqa: ARG002
        """Numbers of tokens that together use every kernel of the backend, if that depends on them.

        Args:
            num_experts: of this rank.
            each: experts that a token chooses.
        """
        return []

    @abstractmethod
    def forward(
        self,
        x_TD: Tensor,
        gate_up_EUD: Tensor,
        down_EDF: Tensor,
        weight_TA: Tensor,
        expert_TA: Tensor,
    ) -> Tensor:
        """
        Args:
            gate_up_EUD: the gate's rows over the up projection's. A row of x, gate_up and down is
                contiguous.
            weight_TA: routing weights, in x's dtype.
            expert_TA: any integer dtype, distinct within a row. A number outside [0, E) is that of
                an expert on another rank, which adds nothing and costs next to nothing.

        Returns:
            y_TD: a new tensor in x's dtype; the sum over a token's experts of
                weight * down(silu(gate(x)) * up(x)). Zero for a token that has none of them here.
        """
