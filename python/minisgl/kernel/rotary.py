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
    qkv_TMH: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    slot_T: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
) -> None:
    """Norm (if there are norms) and turn queries and keys, in place; write keys and values to their slots too.

    Args:
        qkv_TMH: queries, then keys, then values: M = N + 2 K.
        slot_T: int64, unique, in [0, S).
    """
    kernels = kernels_for(qkv_TMH)
    if kernels is None:
        _rotate_and_store_reference(qkv_TMH, norms, rotation, slot_T, k_SKH, v_SKH)
        return
    q_weight_H, k_weight_H, eps = norms or (qkv_TMH[0, 0, :0], qkv_TMH[0, 0, :0], 0.0)
    kernels.rotate_and_store(qkv_TMH, q_weight_H, k_weight_H, eps, *rotation, slot_T, k_SKH, v_SKH)


def _rotate_and_store_reference(
    qkv_TMH: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    slot_T: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
) -> None:
    q_TNH, k_TKH, v_TKH = split_heads(qkv_TMH, k_SKH.shape[1])
    if norms is not None:
        q_TNH.copy_(rms_norm_reference(q_TNH, norms.q_weight_H, norms.eps))
        k_TKH.copy_(rms_norm_reference(k_TKH, norms.k_weight_H, norms.eps))
    turned = qkv_TMH[:, : -k_SKH.shape[1]]
    turned.copy_(rotate(turned, rotation))
    store_kv(k_TKH, v_TKH, k_SKH, v_SKH, slot_T)


def split_heads(qkv_TMH: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values."""
    num_heads = qkv_TMH.shape[1] - 2 * num_kv_heads
    q_TNH, k_TKH, v_TKH = qkv_TMH.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q_TNH, k_TKH, v_TKH
