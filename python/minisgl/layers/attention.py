"""The attention of one layer, between its projections: norm and turn the heads, then ask the backend."""

# Dimension key: T tokens in the batch, N query heads, K kv heads, H head dim, M = N + 2 K heads in all.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import Batch, Context
from minisgl.layers.base import StateLessOP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation


class AttentionLayer(StateLessOP):
    """Per-head norm of queries and keys if the model has it, rotary embedding, paged attention.

    The norms are its owner's, who loads them.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self._layer = layer
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._q_norm = q_norm
        self._k_norm = k_norm

    def forward(self, qkv_TMH: Tensor, rotation: Rotation, batch: Batch, ctx: Context) -> Tensor:
        """o_T(N*H) of this rank's heads."""
        num_turned = self._num_heads + self._num_kv_heads
        turned, v_TKH = qkv_TMH[:, :num_turned], qkv_TMH[:, num_turned:]
        if self._q_norm and self._k_norm:
            q, k = turned[:, : self._num_heads], turned[:, self._num_heads :]
            turned = torch.cat((self._q_norm.forward(q), self._k_norm.forward(k)), dim=1)
        turned = rotation.apply(turned)
        q_TNH, k_TKH = turned[:, : self._num_heads], turned[:, self._num_heads :]
        return ctx.attn_backend.forward(q_TNH, k_TKH, v_TKH, self._layer, batch).flatten(1)
