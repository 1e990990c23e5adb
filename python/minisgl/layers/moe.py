"""A mixture-of-experts MLP: the router and this rank's part of every expert."""

# Dimension key: T tokens in the batch, D model width, F mlp width, E experts, A experts a token.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import Context
from minisgl.distributed import DistributedCommunicator
from minisgl.layers.base import BaseOP, WeightSource


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

    def load(self, source: WeightSource, name: str = "") -> None:
        self._router_ED = source.read(f"{name}.gate.weight", (self._num_experts, self._width))
        share = self._comm.info.share(self._mlp_width, "columns of an expert")
        up_shape, down_shape = (self._mlp_width, self._width), (self._width, self._mlp_width)
        gate_up, down = [], []
        for expert in range(self._num_experts):
            prefix = f"{name}.experts.{expert}"
            gate = source.read(f"{prefix}.gate_proj.weight", up_shape, rows=share)
            up = source.read(f"{prefix}.up_proj.weight", up_shape, rows=share)
            gate_up.append(torch.cat((gate, up)))
            down.append(source.read(f"{prefix}.down_proj.weight", down_shape, cols=share))
        self._gate_up_EXD, self._down_EDF = torch.stack(gate_up), torch.stack(down)

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:
        score_TE = torch.softmax(F.linear(x_TD, self._router_ED), dim=-1, dtype=torch.float32)
        weight_TA, expert_TA = score_TE.topk(self._experts_per_token, dim=-1)
        if self._normalize:
            weight_TA = weight_TA / weight_TA.sum(dim=-1, keepdim=True)
        y_TD = ctx.moe_backend.forward(x_TD, self._gate_up_EXD, self._down_EDF, weight_TA.to(x_TD.dtype), expert_TA)
        return self._comm.all_reduce(y_TD)
