"""Root-mean-square norms with their weight; the formula stands in `kernel/norm.py`."""

# Dimensions: D model width, H head width, K kv heads, M all heads of a token, N query heads,
# T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.distributed import DistributedCommunicator, PartialSum
from minisgl.kernel import residual_norm, rms_norm, split_heads
from minisgl.layers.base import BaseOP, WeightSource


class _Norm(BaseOP):
    def __init__(self, width: int, eps: float) -> None:
        self.eps = eps
        self._width = width

    def load(self, source: WeightSource, name: str = "") -> None:
        self.weight_D = source.read(f"{name}.weight", (self._width,))


class RMSNorm(_Norm):
    """Root-mean-square norm of each row. A `PartialSum` is summed first."""

    def forward(self, x_TD: Tensor | PartialSum) -> Tensor:
        if isinstance(x_TD, PartialSum):
            return x_TD.norm(self.weight_D, self.eps)
        return rms_norm(x_TD, self.weight_D, self.eps)


class RMSNormFused(_Norm):
    """Root-mean-square norm of x plus residual. A `PartialSum` is summed first."""

    def forward(
        self, x_TD: Tensor | PartialSum, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x_TD: may be overwritten if it is still to be added up.
            residual_TD: overwritten with the sum; None is taken for zero.

        Returns:
            normed_TD, residual_TD: the second is x plus residual, un-normalised, for the next norm.
        """
        if isinstance(x_TD, PartialSum):
            return x_TD.add_up_and_norm(residual_TD, self.weight_D, self.eps)
        return residual_norm(x_TD, residual_TD, self.weight_D, self.eps)


class FullWidthQKNorm(BaseOP):
    """Two norms of a token: one over all its query heads, one over all its key heads.

    The heads of a norm may lie on several ranks. Then the ranks add up their sums of squares. A kv
    head that several ranks hold is counted once for each of them, and the sum divided again.

    Args:
        num_heads, num_kv_heads: of all ranks together.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        comm: DistributedCommunicator,
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._eps = eps
        self._comm = comm
        self._heads = comm.info.shard_heads(num_heads)
        self._kv_heads = comm.info.shard_kv_heads(num_kv_heads)

    def load(self, source: WeightSource, name: str = "") -> None:
        """Read `q_norm` and `k_norm` beside `name`."""
        parent = name.rpartition(".")[0]
        self._q_weight_X = self._read(source, f"{parent}.q_norm", self._num_heads, self._heads)
        self._k_weight_X = self._read(
            source, f"{parent}.k_norm", self._num_kv_heads, self._kv_heads
        )

    def _read(self, source: WeightSource, name: str, num_heads: int, shard: range) -> Tensor:
        rows = range(shard.start * self._head_dim, shard.stop * self._head_dim)
        return source.read(f"{name}.weight", (num_heads * self._head_dim,), rows=rows)

    def apply(self, qkv_TMH: Tensor) -> None:
        """Norm queries and keys in place."""
        q_TNH, k_TKH, _ = split_heads(qkv_TMH, len(self._kv_heads))
        q_TX = q_TNH.flatten(1)  # views: the heads of a token lie side by side
        k_TX = k_TKH.flatten(1)
        if self._comm.info.size == 1:
            q_TX.copy_(rms_norm(q_TX, self._q_weight_X, self._eps))
            k_TX.copy_(rms_norm(k_TX, self._k_weight_X, self._eps))
            return
        sums_T2 = torch.stack((_sum_of_squares(q_TX), _sum_of_squares(k_TX)), dim=1)
        q_sum_T1, k_sum_T1 = self._comm.all_reduce(sums_T2).split(1, dim=1)
        num_k_counted = self._comm.info.size * len(self._kv_heads)
        self._scale(q_TX, self._q_weight_X, q_sum_T1 / (self._num_heads * self._head_dim))
        self._scale(k_TX, self._k_weight_X, k_sum_T1 / (num_k_counted * self._head_dim))

    def _scale(self, x_TX: Tensor, weight_X: Tensor, mean_T1: Tensor) -> None:
        x_TX.copy_(x_TX.float() * torch.rsqrt(mean_T1 + self._eps) * weight_X.float())


def _sum_of_squares(x_TX: Tensor) -> Tensor:
    return x_TX.float().square().sum(dim=-1)
