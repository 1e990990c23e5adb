"""The attention of one layer, between its projections. Next to read: `attention/base.py`."""

# Dimensions: D model width, H head width, K kv heads, M all heads of a token, P pages,
# Q positions of a page, T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

from torch import Tensor

from minisgl.core import Batch, Queries
from minisgl.kernel import HeadNorms, rotate_and_store, split_heads, take_rows
from minisgl.layers.base import StateLessOP
from minisgl.layers.context import Context
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RotaryEmbedding


class AttentionLayer(StateLessOP):
    """Norms the heads of queries and keys if the model has such norms, rotates, stores, attends.

    Rotation is RoPE. The attention backend computes the scores. It has the layer's `AttentionSpec`:
    scale, window, soft cap.

    Args:
        layer: whose keys and values these are.
        rope: shared with other layers.
        q_norm, k_norm: norms of one head; their owner loads them.
    """

    def __init__(
        self,
        layer: int,
        rope: RotaryEmbedding,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self._layer = layer
        self._rope = rope
        self._q_norm = q_norm
        self._k_norm = k_norm

    def forward(self, qkv_TMH: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """The outputs of this rank's query heads, side by side, for each token that attends.

        qkv_TMH is overwritten.
        """
        norms = None
        if self._q_norm and self._k_norm:
            norms = HeadNorms(self._q_norm.weight_D, self._k_norm.weight_D, self._q_norm.eps)
        rotation = self._rope.forward(batch.position_T)
        k_PQKH = ctx.kv_pool.k_cache(self._layer)
        v_PQKH = ctx.kv_pool.v_cache(self._layer)
        rotate_and_store(qkv_TMH, norms, rotation, batch.slot_T, k_PQKH, v_PQKH)
        queries = batch.queries
        heads = split_heads(take_queries(qkv_TMH, queries), k_PQKH.shape[2])
        return ctx.attn_backend.forward(*heads, self._layer, queries).flatten(1)


def take_queries(x: Tensor, queries: Queries) -> Tensor:
    """The rows of the tokens that attend, out of those of all tokens of a step.

    The rows of some of the tokens are a copy. The kernel that copies must not start before its
    predecessor has ended: attention that starts early relies on keys and values that were stored
    before the copy.
    """
    return x if queries.index_X is None else take_rows(x, queries.index_X)
