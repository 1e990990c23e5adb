"""Triton kernels for all experts at once; the host does not learn which experts were chosen."""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# T tokens of a step, U both halves of a gated mlp.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel import MOST_PAIRS_AT_ONCE, triton_kernels_for
from minisgl.moe.base import BaseMoeBackend
from minisgl.moe.tiles import TileTable, rule_table

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FusedMoeBackend(BaseMoeBackend):
    """A few launches whose grids depend on the number of tokens alone, so they can be captured.

    A step of few tokens reads an expert's weight once for each token, which is bound by memory.
    More tokens are sorted by expert, so that those of an expert share one read of its weight.

    Args:
        tuned: the tiles of steps; those of the rule if it is None.
        ep: ranks that divide the experts of a layer.
    """

    def __init__(self, tuned: TileTable | None = None, ep: int = 1) -> None:
        self._tuned = tuned
        self._ep = ep

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether its kernels compute in a dtype on a device."""
        return device.type == "cuda" and dtype in _DTYPES

    def nums_of_tokens(self, num_experts: int, each: int) -> list[int]:
        by_tiles = self._table(num_experts, each).nums_of_tokens
        return sorted({*by_tiles, MOST_PAIRS_AT_ONCE // each + 1})

    def _table(self, num_experts: int, each: int) -> TileTable:
        return self._tuned or rule_table(num_experts * self._ep, each)

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
        y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        inputs = (x_TD, gate_up_EUD, down_EDF, weight_TA, expert_TA)
        tiles = self._table(len(down_EDF), expert_TA.shape[1]).find(len(x_TD))
        if tiles is None:
            kernels.moe_by_token(*inputs, y_TD)
        else:
            kernels.moe_by_expert(*inputs, y_TD, tiles)
        return y_TD
