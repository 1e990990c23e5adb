"""Bans tokens by grammar masks."""

# Dimensions: B requests of a step, V vocabulary, W words of 32 bits,
# X a selection out of another dimension.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def mask_logits(logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, in place.

    Args:
        mask_B: int32, the index of the mask of each row; -1 for none.
        bits_XW: int32, X masks of W = ceil(V / 32) words. Bit v % 32 of word v // 32 is set if
            token v may stay. The masks may lie in pinned host memory, which a GPU reads.
    """
    kernels = kernels_for(logits_BV)
    if kernels is None:
        mask_logits_reference(logits_BV, mask_B, bits_XW)
    else:
        kernels.mask_logits(logits_BV, mask_B, bits_XW)


def mask_logits_reference(logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
    """Compute what `mask_logits` does, for tensors of a CPU."""
    for row in (mask_B >= 0).nonzero()[:, 0]:
        packed = bits_XW[mask_B[row]].numpy().view(np.uint8)
        is_allowed_V = np.unpackbits(packed, count=logits_BV.shape[1], bitorder="little")
        logits_BV[row].masked_fill_(torch.from_numpy(is_allowed_V) == 0, -torch.inf)
