"""Ban tokens by bit masks, as grammars give them."""

# Dimension key: B requests, V vocab, X requests that have a mask, W words of 32 bits.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def mask_logits(logits_BV: Tensor, row_X: Tensor, bits_XW: Tensor) -> None:
    """Set the logits of banned tokens to minus infinity, in place.

    Args:
        row_X: int32, unique; the others are left as they are.
        bits_XW: int32, [X, ceil(V / 32)]; bit v % 32 of word v // 32 says whether token v may stay.
    """
    kernels = kernels_for(logits_BV)
    (kernels.mask_logits if kernels else mask_logits_reference)(logits_BV, row_X, bits_XW)


def mask_logits_reference(logits_BV: Tensor, row_X: Tensor, bits_XW: Tensor) -> None:
    """The same, on a CPU."""
    bytes_X = bits_XW.contiguous().numpy().view(np.uint8)
    may_XV = np.unpackbits(bytes_X, axis=1, count=logits_BV.shape[1], bitorder="little")
    logits_BV[row_X.long()] = logits_BV[row_X.long()].masked_fill_(torch.from_numpy(may_XV) == 0, -torch.inf)
