"""Linear layers, sharded by output (column parallel) or by input (row parallel).

After Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a column-parallel layer followed by a row-parallel one
needs a single all-reduce. Layers that read the same input are merged into one product. A layer owns the format
of its weight.
"""

# Dimension key: T tokens in the batch, D inputs, F outputs.

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import DistributedCommunicator, DistributedInfo
from minisgl.kernel import CpuLinear, one_token_linear
from minisgl.layers.base import BaseOP, WeightSource


class LinearBase(BaseOP):
    """y = x @ weight.T + bias with this rank's part of weight_FD and bias_F."""

    _weight_FD: Tensor
    _bias_F: Tensor | None = None
    _cpu: CpuLinear | None = None

    def prepare(self, *, pack: bool) -> None:
        """Choose how to multiply, once the weight is there. `pack` allows a second copy of it on a CPU."""
        if self._weight_FD.device.type == "cpu":
            self._cpu = CpuLinear(self._weight_FD, self._bias_F, pack=pack)

    @property
    def num_bytes(self) -> int:
        return self._weight_FD.nbytes

    def multiply(self, x_TD: Tensor) -> Tensor:
        if self._cpu:
            return self._cpu(x_TD)
        if len(x_TD) == 1 and x_TD.is_cuda:
            return one_token_linear(x_TD, self._weight_FD, self._bias_F)
        return F.linear(x_TD, self._weight_FD, self._bias_F)


class LinearColParallelMerged(LinearBase):
    """Several outputs of one input, each sharded by output.

    Args:
        parts: the names of the checkpoint's layers and the number of outputs of each.
        shares: this rank's outputs of each part.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], shares: dict[str, range], *, bias: bool
    ) -> None:
        self._in_features = in_features
        self._parts = parts
        self._shares = shares
        ends = list(accumulate(len(share) for share in shares.values()))
        self._columns = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._has_bias = bias

    @classmethod
    def even(
        cls, in_features: int, parts: dict[str, int], info: DistributedInfo, *, bias: bool
    ) -> LinearColParallelMerged:
        """Every part is divided evenly over the ranks."""
        shares = {name: info.shard(size, f"outputs of {name}") for name, size in parts.items()}
        return cls(in_features, parts, shares, bias=bias)

    def load(self, source: WeightSource, name: str = "") -> None:
        parent = name.rpartition(".")[0]
        weights, biases = [], []
        for part, size in self._parts.items():
            rows = self._shares[part]
            weights.append(
                source.read(f"{parent}.{part}.weight", (size, self._in_features), rows=rows)
            )
            if self._has_bias:
                biases.append(source.read(f"{parent}.{part}.bias", (size,), rows=rows))
        self._weight_FD = torch.cat(weights)
        self._bias_F = torch.cat(biases) if biases else None

    def forward(self, x_TD: Tensor) -> list[Tensor]:
        """The outputs of the parts, each [T, its share]; views of one tensor."""
        y_TF = self.multiply(x_TD)
        return [y_TF[:, columns] for columns in self._columns]


class LinearQKVMerged(LinearColParallelMerged):
    """Queries, keys and values of one input, sharded by head; kv heads are replicated where ranks outnumber them.

    `num_heads` and `num_kv_heads` are this rank's.
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
        heads = info.shard(num_heads, "attention heads")
        kv_heads = info.shard_kv_heads(num_kv_heads)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        self._head_dim = head_dim
        sizes = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        shares = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        super().__init__(
            in_features,
            {name: count * head_dim for name, count in sizes.items()},
            {
                name: range(held.start * head_dim, held.stop * head_dim)
                for name, held in shares.items()
            },
            bias=bias,
        )

    def forward_heads(self, x_TD: Tensor) -> Tensor:
        """All heads of this rank, queries before keys before values: [T, heads + 2 kv heads, H]."""
        qkv_TX = self.multiply(x_TD)
        return qkv_TX.view(len(qkv_TX), -1, self._head_dim)


class LinearRowParallel(LinearBase):
    """Sharded by input; the ranks' partial sums are added up. The bias is added once, by rank 0."""

    def __init__(
        self, in_features: int, out_features: int, comm: DistributedCommunicator, *, bias: bool
    ) -> None:
        self._shape = (out_features, in_features)
        self._comm = comm
        self._has_bias = bias

    def load(self, source: WeightSource, name: str = "") -> None:
        info = self._comm.info
        cols = info.shard(self._shape[1], f"inputs of {name}")
        self._weight_FD = source.read(f"{name}.weight", self._shape, cols=cols)
        if self._has_bias and info.is_primary:
            self._bias_F = source.read(f"{name}.bias", self._shape[:1])

    def forward(self, x_TD: Tensor) -> Tensor:
        return self._comm.all_reduce(self.multiply(x_TD))
