"""A mixture-of-experts MLP: the router and this rank's part of every expert."""

# Dimension key: T tokens in the batch, D model width, F mlp width, E experts, A experts a token, X = 2 F.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import Context
from minisgl.distributed import DistributedCommunicator
from minisgl.kernel import route
from minisgl.layers.base import BaseOP, WeightSource
from minisgl.layers.linear import LinearColParallelMerged


class MoELayer(BaseOP):
    """softmax(router) picks A experts a token; each expert is a gated MLP, sharded over its width F.

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
        self._num_experts = num_experts
        self._experts_per_token = experts_per_token
        self._comm = comm
        self._normalize = normalize
        self.gate = LinearColParallelMerged(
            width, {"gate": num_experts}, {"gate": range(num_experts)}, bias=False
        )

    def load(self, source: WeightSource, name: str = "") -> None:
        self.gate.load(source, f"{name}.gate")
        share = self._comm.info.shard(self._mlp_width, "columns of an expert")
        up_shape, down_shape = (self._mlp_width, self._width), (self._width, self._mlp_width)
        for expert in range(self._num_experts):
            prefix = f"{name}.experts.{expert}"
            gate = source.read(f"{prefix}.gate_proj.weight", up_shape, rows=share)
            up = source.read(f"{prefix}.up_proj.weight", up_shape, rows=share)
            down = source.read(f"{prefix}.down_proj.weight", down_shape, cols=share)
            if expert == 0:  # there is no room for all experts and a stack of them
                self._gate_up_EXD = gate.new_empty(self._num_experts, 2 * len(share), self._width)
                self._down_EDF = down.new_empty(self._num_experts, *down.shape)
            torch.cat((gate, up), out=self._gate_up_EXD[expert])
            self._down_EDF[expert] = down

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        (logits_TE,) = self.gate.forward(x_TD)
        weight_TA, expert_TA = route(logits_TE, self._experts_per_token, self._normalize)
        return self._comm.all_reduce(
            ctx.moe_backend.forward(x_TD, self._gate_up_EXD, self._down_EDF, weight_TA, expert_TA)
        )
