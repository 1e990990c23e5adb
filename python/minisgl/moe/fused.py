"""Triton kernels for all experts at once; the host does not learn which experts were chosen."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel import triton_kernels_for
from minisgl.moe.base import BaseMoeBackend

# Up to so many tokens seldom choose an expert in common, so nothing is gained by listing them.
_MAX_BY_TOKEN = 4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FusedMoeBackend(BaseMoeBackend):
    """A few launches whose grids depend on the number of tokens alone, so that they are captured.

    A step of few tokens reads an expert's weight once for each token, which is bound by memory.
    More tokens are listed by expert, and share the reading of a weight.
    """

    @classmethod
    def runs(cls, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype in _DTYPES

    def nums_of_tokens(self, num_experts: int, each: int) -> list[int]:
        kernels = triton_kernels_for(torch.empty(0, device="cuda"))
        assert kernels is not None
        by_tile: list[int] = kernels.nums_of_tokens_by_tile(num_experts, each)
        return [1, *(max(num_tokens, _MAX_BY_TOKEN + 1) for num_tokens in by_tile)]

    def forward(
        self,
        x_TD: Tensor,
        gate_up_EUD: Tensor,
        down_EDF: Tensor,
        weight_TA: Tensor,
        expert_TA: Tensor,
    ) -> Tensor:
        kernels = triton_kernels_for(x_TD)
        assert kernels is not None
        multiply = kernels.moe_by_expert
        if len(x_TD) <= _MAX_BY_TOKEN:
            multiply = kernels.moe_by_token
        y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        multiply(x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA, y_TD)
        return y_TD
