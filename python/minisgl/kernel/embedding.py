"""Rows of a table by their index, as an embedding reads them."""

# Dimensions: D model width, T tokens of a step, V vocabulary.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for


def embed(token_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Return x_TD = weight_VD[token_T] as a new tensor.

    Args:
        token_T: int64, in [0, V); not range-checked on a CPU.
    """
    kernels = None if weight_VD.is_cuda else kernels_for(weight_VD)
    if kernels is None:
        return F.embedding(token_T, weight_VD)
    x_TD = weight_VD.new_empty((len(token_T), weight_VD.shape[1]))
    kernels.take_rows(weight_VD, token_T, x_TD)
    return x_TD
