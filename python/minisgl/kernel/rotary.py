"""What happens to the heads of a step between their projection and attention."""

# Dimension key: T tokens in the batch, M heads in all, N query heads, K kv heads, H head dim, S kv slots, L positions.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for
from minisgl.kernel.norm import rms_norm_reference
from minisgl.kernel.store import store_kv


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys, each head by itself."""

    q_weight_H: Tensor
    k_weight_H: Tensor
    eps: float


class Rotation(NamedTuple):
    """The angles of one step: rows of a table of [cos, cos] and one of [-sin, sin], in the activations' dtype."""

    cos_LH: Tensor
    sin_LH: Tensor
    position_T: Tensor


def rotate(x_TNH: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (i, i + H/2) of each head; a new tensor of x's shape and dtype."""
    cos_T1H = rotation.cos_LH[rotation.position_T].unsqueeze(1)
    sin_T1H = rotation.sin_LH[rotation.position_T].unsqueeze(1)
    return torch.addcmul(x_TNH * cos_T1H, x_TNH.roll(x_TNH.shape[-1] // 2, -1), sin_T1H)


def rotate_and_store(
    qkv_TMH: Tensor, norms: HeadNorms | None, rotation: Rotation, slot_T: Tensor, k_SKH: Tensor, v_SKH: Tensor
) -> Tensor:
    """Norm (if there are norms) and turn queries and keys; write keys and values to their slots, in place.

    Args:
        qkv_TMH: queries, then keys, then values: M = N + 2 K.
        slot_T: int64, unique, in [0, S).

    Returns:
        q_TNH.
    """
    num_kv_heads = k_SKH.shape[1]
    num_heads = qkv_TMH.shape[1] - 2 * num_kv_heads
    kernels = kernels_for(qkv_TMH)
    if kernels is not None:
        q_TNH = qkv_TMH.new_empty(len(qkv_TMH), num_heads, qkv_TMH.shape[2])
        q_weight_H, k_weight_H, eps = norms or (q_TNH[0, 0, :0], q_TNH[0, 0, :0], 0.0)
        kernels.rotate_and_store(qkv_TMH, q_weight_H, k_weight_H, eps, *rotation, slot_T, q_TNH, k_SKH, v_SKH)
        return q_TNH
    q_TNH, k_TKH, v_TKH = qkv_TMH.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        q_TNH = rms_norm_reference(q_TNH, norms.q_weight_H, norms.eps)
        k_TKH = rms_norm_reference(k_TKH, norms.k_weight_H, norms.eps)
    store_kv(rotate(k_TKH, rotation), v_TKH, k_SKH, v_SKH, slot_T)
    return rotate(q_TNH, rotation)
