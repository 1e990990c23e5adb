"""A mixture-of-experts MLP: the router, and this rank's part of the experts."""

# Dimensions: A experts that a token chooses, D model width, E experts, T tokens of a step.

from __future__ import annotations

from torch import Tensor

from minisgl.distributed import DistributedCommunicator, PartialSum, SumOverRanks
from minisgl.kernel import route
from minisgl.layers.base import BaseOP, WeightSource
from minisgl.layers.context import Context
from minisgl.layers.linear import LinearColParallelMerged
from minisgl.layers.weights import load_expert_bank


class MoELayer(BaseOP):
    """softmax(router) chooses A experts per token; each expert is a gated MLP.

    The ranks divide the width of each expert, or the experts (`DistributedInfo.ep`). All of them
    route all tokens, and add up what their experts give.

    Args:
        normalize: whether the A weights of a token are scaled to sum to one.
    """

    def __init__(
        self,
        width: int,
        mlp_width: int,
        num_experts: int,
        experts_per_token: int,
        comm: DistributedCommunicator,
        *,
        normalize: bool,
    ) -> None:
        self._width = width
        self._mlp_width = mlp_width
        self._own_experts = comm.info.shard_experts(num_experts)
        self._own_columns = comm.info.shard_expert_columns(mlp_width)
        self._experts_per_token = experts_per_token
        self._comm = comm
        self._normalize = normalize
        # The router, whole on each rank, under the checkpoint's name.
        self.gate = LinearColParallelMerged(
            width, {"gate": num_experts}, {"gate": range(num_experts)}, bias=False
        )

    def load(self, source: WeightSource, name: str = "") -> None:
        self.gate.load(source, f"{name}.gate")
        shape = (self._mlp_width, self._width)
        self._experts = load_expert_bank(
            source, f"{name}.experts", self._own_experts, shape, self._own_columns
        )

    def forward(self, x_TD: Tensor, ctx: Context) -> PartialSum:
        logits_TE = self.gate.multiply(x_TD)
        weight_TA, expert_TA = route(
            logits_TE, self._experts_per_token, self._normalize, self._own_experts.start
        )
        y_TD = self._experts.multiply(x_TD, weight_TA, expert_TA, ctx.moe_backend)
        return SumOverRanks(y_TD, self._comm)
