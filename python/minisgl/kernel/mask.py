"""Ban tokens by bit masks, as grammars give them."""

# Dimension key: B requests, V vocab, X masks, W words of 32 bits.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def mask_logits(logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, in place.

    Args:
        mask_B: int32, which mask a row has; -1: none.
        bits_XW: int32, [X, ceil(V / 32)]; bit v % 32 of word v // 32 says whether token v may stay.
    """
    kernels = kernels_for(logits_BV)
    (kernels.mask_logits if kernels else mask_logits_reference)(logits_BV, mask_B, bits_XW)


def mask_logits_reference(logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
    """The same, on a CPU."""
    for row in (mask_B >= 0).nonzero()[:, 0]:
        words = bits_XW[mask_B[row]].numpy().view(np.uint8)
        may_V = np.unpackbits(words, count=logits_BV.shape[1], bitorder="little")
        logits_BV[row].masked_fill_(torch.from_numpy(may_V) == 0, -torch.inf)
