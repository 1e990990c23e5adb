"""Ban tokens by bit masks, as grammars give them."""

# Dimension key: B requests, V vocab, X requests that have a mask, W words of 32 bits.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def mask_logits(logits_BV: Tensor, row_X: Tensor, bits_XW: Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, in place.

    Args:
        row_X: int32, unique; the others are left as they are.
        bits_XW: int32, [X, ceil(V / 32)]; bit v % 32 of word v // 32 says whether token v may stay.
    """
    if logits_BV.is_cuda:
        kernels = kernels_for(logits_BV)
        assert kernels is not None
        kernels.mask_logits(logits_BV, row_X, bits_XW)
    else:
        mask_logits_reference(logits_BV, row_X, bits_XW)


def mask_logits_reference(logits_BV: Tensor, row_X: Tensor, bits_XW: Tensor) -> None:
    bit_XW32 = (bits_XW[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bits_XW.device)) & 1
    is_banned_XV = bit_XW32.flatten(1)[:, : logits_BV.shape[1]] == 0
    logits_BV[row_X.long()] = logits_BV[row_X.long()].masked_fill_(is_banned_XV, -torch.inf)
