"""Linear layers, sharded by output (column parallel) or by input (row parallel).

A column-parallel layer followed by a row-parallel one needs a single all-reduce (Megatron-LM,
Shoeybi et al. 2019, arXiv:1909.08053). Layers that read the same input are merged into one product.
A layer owns which outputs and inputs fall to its rank, the bias and the collective; its
`LinearWeight` owns the numbers and the product.
"""

# Dimensions: H head width, I inputs of a linear layer, M all heads of a token,
# O outputs of a linear layer, T tokens of a step, X a selection out of another dimension: parts of
# the inputs.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.distributed import (
    DistributedCommunicator,
    DistributedInfo,
    PartialSum,
    SumOverInputs,
    SumOverRanks,
)
from minisgl.layers.base import BaseOP, WeightSource
from minisgl.layers.weights import Gated, LayerShard, LinearWeight, load_linear_weight


class LinearBase(BaseOP):
    """y = x @ weight.T + bias with this rank's shard of both."""

    _weight: LinearWeight
    _bias_O: Tensor | None = None

    def choose_kernel(self, *, pack: bool) -> None:
        """Choose how to multiply, once the weight is there.

        Args:
            pack: on a CPU, a second copy of the weight may be made.
        """
        self._weight.choose_kernel(pack=pack)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as it is held, without a packed copy."""
        return self._weight.num_bytes

    def multiply(self, x_TI: Tensor) -> Tensor:
        """y_TO of this rank."""
        return self._weight.multiply(x_TI, self._bias_O)


class LinearColParallelMerged(LinearBase):
    """Several layers of the checkpoint with one input, each sharded by output.

    Args:
        layers: the names of the checkpoint's layers and the number of outputs of each.
        shards: this rank's outputs of each layer.
    """

    def __init__(
        self, in_features: int, layers: dict[str, int], shards: dict[str, range], *, bias: bool
    ) -> None:
        self._in_features = in_features
        self._layers = layers
        self._shards = shards
        self._has_bias = bias

    def load(self, source: WeightSource, name: str = "") -> None:
        parent = name.rpartition(".")[0]
        shards = [
            LayerShard(f"{parent}.{layer}", (size, self._in_features), outputs=self._shards[layer])
            for layer, size in self._layers.items()
        ]
        self._weight = load_linear_weight(source, shards)
        if self._has_bias:
            biases = [
                source.read(f"{shard.name}.bias", shard.shape[:1], rows=shard.outputs)
                for shard in shards
            ]
            self._bias_O = torch.cat(biases)


class LinearGated(LinearColParallelMerged):
    """Gate and up projection of a gated MLP, and its activation."""

    def __init__(
        self, width: int, mlp_width: int, activation: Gated, info: DistributedInfo, *, bias: bool
    ) -> None:
        names = ("gate_proj", "up_proj")
        shard = info.shard(mlp_width, "outputs of gate_proj")
        sizes = dict.fromkeys(names, mlp_width)
        super().__init__(width, sizes, dict.fromkeys(names, shard), bias=bias)
        self._activation = activation

    def forward_gated(self, x_TI: Tensor) -> Tensor:
        """activation(gate, up) on this rank: the inputs of the down projection."""
        return self._weight.multiply_gated(x_TI, self._bias_O, self._activation)


class LinearQKVMerged(LinearColParallelMerged):
    """Queries, keys and values of one input, sharded by head.

    Where the ranks outnumber the kv heads, several ranks hold the same kv head.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        info: DistributedInfo,
        *,
        bias: bool,
    ) -> None:
        heads = info.shard_heads(num_heads)
        kv_heads = info.shard_kv_heads(num_kv_heads)
        self._head_dim = head_dim
        sizes = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        shards = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        super().__init__(
            in_features,
            {name: count * head_dim for name, count in sizes.items()},
            {
                name: range(shard.start * head_dim, shard.stop * head_dim)
                for name, shard in shards.items()
            },
            bias=bias,
        )

    def forward_heads(self, x_TI: Tensor) -> Tensor:
        """qkv_TMH: all heads of this rank, queries before keys before values."""
        qkv_TO = self.multiply(x_TI)
        return qkv_TO.view(len(qkv_TO), -1, self._head_dim)


class LinearRowParallel(LinearBase):
    """One layer of the checkpoint, sharded by input.

    Each rank has a part of the sum. Rank 0 alone adds the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, comm: DistributedCommunicator, *, bias: bool
    ) -> None:
        self._shape = (out_features, in_features)
        self._comm = comm
        self._has_bias = bias

    def load(self, source: WeightSource, name: str = "") -> None:
        info = self._comm.info
        inputs = info.shard(self._shape[1], f"inputs of {name}")
        shard = LayerShard(name, self._shape, inputs=inputs)
        self._weight = load_linear_weight(source, [shard])
        if self._has_bias and info.leads:
            self._bias_O = source.read(f"{name}.bias", self._shape[:1])

    def forward(self, x_TI: Tensor) -> PartialSum:
        """y_TO, which is still to be added up."""
        if self._comm.info.size == 1:
            parts_XTO = self._weight.multiply_in_parts(x_TI, self._bias_O)
            if parts_XTO is not None:
                return SumOverInputs(parts_XTO, x_TI.dtype)
        return SumOverRanks(self.multiply(x_TI), self._comm)
