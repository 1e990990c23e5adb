"""The attention of one layer, between its projections: norm, turn and store the heads, then ask the backend."""

# Dimension key: T tokens in the batch, N query heads, K kv heads, H head dim, M = N + 2 K heads in all.

from __future__ import annotations

from torch import Tensor

from minisgl.core import Batch
from minisgl.kernel import HeadNorms, Rotation, rotate_and_store, split_heads
from minisgl.layers.base import StateLessOP
from minisgl.layers.context import Context
from minisgl.layers.norm import RMSNorm


class AttentionLayer(StateLessOP):
    """Per-head norm of queries and keys if the model has it, rotary embedding, paged attention.

    The norms are its owner's, who loads them.
    """

    def __init__(
        self, layer: int, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
    ) -> None:
        self._layer = layer
        self._q_norm = q_norm
        self._k_norm = k_norm

    def forward(self, qkv_TMH: Tensor, rotation: Rotation, batch: Batch, ctx: Context) -> Tensor:
        """o_T(N*H) of this rank's heads."""
        norms = None
        if self._q_norm and self._k_norm:
            norms = HeadNorms(self._q_norm.weight_D, self._k_norm.weight_D, self._q_norm.eps)
        k_SKH, v_SKH = ctx.kv_pool.k_cache(self._layer), ctx.kv_pool.v_cache(self._layer)
        rotate_and_store(qkv_TMH, norms, rotation, batch.slot_T, k_SKH, v_SKH)
        heads = split_heads(qkv_TMH, k_SKH.shape[1])
        return ctx.attn_backend.forward(*heads, self._layer, batch).flatten(1)
