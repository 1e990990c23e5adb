"""Attention over a paged context: single queries, and the causal softmax of a prompt's scores."""

# Dimensions: B requests of a step, G query heads that share a kv head, H head width, K kv heads,
# L positions of a sequence, N query heads, P pages, R rows of the tables, S kv slots,
# T tokens of a step, Z entries of a flat list.

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def attend_decode(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    page_table_RP: Tensor,
    page_size: int,
    token_B: Tensor,
    row_B: Tensor,
    position_B: Tensor,
    o_TNH: Tensor,
    shared_1: Tensor | None = None,
) -> None:
    """Attend with query token_B[b] to positions [0, position_B[b]] of table row row_B[b].

    Row token_B[b] of o_TNH receives the result; all other rows keep what they hold.

    Args:
        q_TNH, o_TNH: the heads of a token lie side by side; query head n reads kv head n * K // N.
        token_B, row_B, position_B: int64; on a GPU any integers.
        shared_1: int32, the length of the prefix whose pages all rows have in common. It is a hint
            for a GPU: the result does not depend on it.
    """
    kernels = kernels_for(q_TNH)
    if kernels is None:
        attend_decode_reference(
            q_TNH, k_SKH, v_SKH, page_table_RP, page_size, token_B, row_B, position_B, o_TNH
        )
    elif q_TNH.is_cuda:
        kernels.attend_decode(
            q_TNH, k_SKH, v_SKH, page_table_RP, page_size, token_B, row_B, position_B, o_TNH,
            shared_1,
        )  # fmt: skip
    else:
        kernels.attend_decode(
            q_TNH, k_SKH, v_SKH, page_table_RP, page_size, token_B, row_B, position_B, o_TNH
        )


def attend_decode_reference(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    page_table_RP: Tensor,
    page_size: int,
    token_B: Tensor,
    row_B: Tensor,
    position_B: Tensor,
    o_TNH: Tensor,
) -> None:
    """Compute what `attend_decode` does, in plain torch, one request after the other."""
    group = q_TNH.shape[1] // k_SKH.shape[1]
    for token, row, position in zip(
        token_B.tolist(), row_B.tolist(), position_B.tolist(), strict=True
    ):
        position_L = torch.arange(position + 1, device=q_TNH.device)
        page_L = page_table_RP[row, position_L // page_size].long()
        slot_L = page_L * page_size + position_L % page_size
        q_KGH = q_TNH[token].unflatten(0, (-1, group)).float()
        k_KLH = k_SKH[slot_L].transpose(0, 1).float()
        v_KLH = v_SKH[slot_L].transpose(0, 1).float()
        score_KGL = q_KGH @ k_KLH.transpose(1, 2) / math.sqrt(q_TNH.shape[2])
        o_KGH = torch.softmax(score_KGL, dim=-1) @ v_KLH
        o_TNH[token] = o_KGH.flatten(0, 1).to(o_TNH.dtype)


def causal_softmax(score_KZL: Tensor, start: int, length: int, scale: float) -> None:
    """Replace scores by softmax(score * scale) over L, in place, under a causal mask.

    Row z has the scores of the query at position start + z % length, which sees positions up to
    its own. The weights of later positions become 0.

    Args:
        score_KZL: contiguous; Z = G * length, and L = start + length.
    """
    kernels = None if score_KZL.is_cuda else kernels_for(score_KZL)
    if kernels is not None:
        kernels.causal_softmax(score_KZL, start, length, scale)
        return
    score_KGTL = score_KZL.unflatten(1, (-1, length))
    ones_TL = torch.ones(score_KGTL.shape[2:], dtype=torch.bool, device=score_KZL.device)
    is_future_TL = ones_TL.triu(start + 1)
    masked_KGTL = (score_KGTL * scale).masked_fill(is_future_TL, -math.inf)
    score_KGTL.copy_(torch.softmax(masked_KGTL, dim=-1))
