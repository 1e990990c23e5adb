"""The steps of attention over a paged context, on a CPU."""

# Dimension key: T tokens in the batch, B single queries among them, N query heads, K kv heads, H head dim, S kv slots,
# R table rows, P pages, L positions of a context, X rows of scores.

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
    """Write row token_B[b] of the output: that query's attention to positions [0, position_B[b]] of table row row_B[b].

    Args:
        q_TNH, o_TNH: the heads of a token lie side by side; query head n reads kv head n * K // N.
        token_B, row_B, position_B: int64; on a GPU any integers.
        shared_1: int32, leading tokens whose pages all rows have in common, if that is to be made use of.
    """
    kernels = kernels_for(q_TNH)
    attend = attend_decode_reference if kernels is None else kernels.attend_decode
    hints = () if shared_1 is None else (shared_1,)
    attend(q_TNH, k_SKH, v_SKH, page_table_RP, page_size, token_B, row_B, position_B, o_TNH, *hints)


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
    shared_1: Tensor | None = None,  # noqa: ARG001 - changes how, not what
) -> None:
    """The same, one request after the other."""
    group = q_TNH.shape[1] // k_SKH.shape[1]
    for token, row, position in zip(
        token_B.tolist(), row_B.tolist(), position_B.tolist(), strict=True
    ):
        position_L = torch.arange(position + 1, device=q_TNH.device)
        slot_L = (
            page_table_RP[row, position_L // page_size].long() * page_size + position_L % page_size
        )
        q_K1GH = q_TNH[token].unflatten(0, (-1, group))
        k_KLH, v_KLH = k_SKH[slot_L].transpose(0, 1), v_SKH[slot_L].transpose(0, 1)
        weights_KGL = torch.softmax(
            q_K1GH.float() @ k_KLH.float().transpose(1, 2) / math.sqrt(q_TNH.shape[2]), dim=-1
        )
        o_TNH[token] = (weights_KGL @ v_KLH.float()).flatten(0, 1).to(o_TNH.dtype)


def causal_softmax(score_KXL: Tensor, start: int, length: int, scale: float) -> None:
    """softmax(score * scale) over L, in place; row x is of a query at position start + x % length, and sees up to it.

    Args:
        score_KXL: contiguous; L = start + length.
    """
    kernels = None if score_KXL.is_cuda else kernels_for(score_KXL)
    if kernels is not None:
        kernels.causal_softmax(score_KXL, start, length, scale)
        return
    score_KGTL = score_KXL.unflatten(1, (-1, length))
    is_future_TL = torch.ones(score_KGTL.shape[2:], dtype=torch.bool, device=score_KXL.device).triu(
        start + 1
    )
    score_KGTL.copy_(
        torch.softmax((score_KGTL * scale).masked_fill(is_future_TL, -math.inf), dim=-1)
    )
