"""Rotary embedding (Su et al. 2021, arXiv:2104.09864), with head norms and the KV store.

One call does all that happens to the heads of a step between their projection and attention.
"""

# Dimensions: H head width, K kv heads, L positions of a sequence, M all heads of a token: N + 2 K,
# N query heads, P pages, Q positions of a page, T tokens of a step.

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for
from minisgl.kernel.norm import rms_norm_reference
from minisgl.kernel.store import store_kv


class HeadNorms(NamedTuple):
    """The weights of the RMS norms of queries and of keys; each head is normed by itself."""

    q_weight_H: Tensor
    k_weight_H: Tensor
    eps: float


class Rotation(NamedTuple):
    """The angles of one step: a row of each table for every token.

    Attributes:
        cos_LH: [cos, cos] of each position, in the activations' dtype.
        sin_LH: [-sin, sin] of each position, likewise.
        position_T: int32, in [0, L).
    """

    cos_LH: Tensor
    sin_LH: Tensor
    position_T: Tensor


def rotate(x_TNH: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (i, i + H/2) of each head; a new tensor of x's shape and dtype."""
    cos_T1H = rotation.cos_LH[rotation.position_T].unsqueeze(1)
    sin_T1H = rotation.sin_LH[rotation.position_T].unsqueeze(1)
    return torch.addcmul(x_TNH * cos_T1H, x_TNH.roll(x_TNH.shape[-1] // 2, -1), sin_T1H)


def rotate_and_store(
    qkv_TMH: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    slot_T: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
) -> None:
    """Norm (unless norms is None) and rotate queries and keys, in place, and store keys and values.

    Args:
        qkv_TMH: queries, then keys, then values.
        k_PQKH, v_PQKH: of equal strides; the numbers of a head lie side by side.
        slot_T: int64, in [0, P * Q): where the pools take each token, position s % Q of page
            s // Q. Of tokens with equal slots any one is stored; only padding tokens share slots,
            in the padding page. On a GPU the kernel launched just before writes neither slots nor
            positions.
    """
    kernels = kernels_for(qkv_TMH)
    if kernels is None:
        _rotate_and_store_reference(qkv_TMH, norms, rotation, slot_T, k_PQKH, v_PQKH)
        return
    if norms is None:
        norms = _no_norms(qkv_TMH.dtype, qkv_TMH.device)
    kernels.rotate_and_store(qkv_TMH, *norms, *rotation, slot_T, k_PQKH, v_PQKH)


@functools.cache
def _no_norms(dtype: torch.dtype, device: torch.device) -> HeadNorms:
    """Empty weights, which to the kernels mean no norm."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return HeadNorms(empty, empty, 0.0)


def _rotate_and_store_reference(
    qkv_TMH: Tensor,
    norms: HeadNorms | None,
    rotation: Rotation,
    slot_T: Tensor,
    k_PQKH: Tensor,
    v_PQKH: Tensor,
) -> None:
    q_TNH, k_TKH, v_TKH = split_heads(qkv_TMH, k_PQKH.shape[2])
    if norms is not None:
        q_TNH.copy_(rms_norm_reference(q_TNH, norms.q_weight_H, norms.eps))
        k_TKH.copy_(rms_norm_reference(k_TKH, norms.k_weight_H, norms.eps))
    queries_and_keys = qkv_TMH[:, : -k_PQKH.shape[2]]
    queries_and_keys.copy_(rotate(queries_and_keys, rotation))
    store_kv(k_TKH, v_TKH, k_PQKH, v_PQKH, slot_T)


def split_heads(qkv_TMH: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split all heads into views q_TNH, k_TKH and v_TKH."""
    num_heads = qkv_TMH.shape[1] - 2 * num_kv_heads
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    q_TNH, k_TKH, v_TKH = qkv_TMH.split_with_sizes(sizes, dim=1)
    return q_TNH, k_TKH, v_TKH
