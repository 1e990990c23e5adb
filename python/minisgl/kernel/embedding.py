"""Looks up rows of a table by index, as an embedding does."""

# Dimensions: D model width, T tokens of a step, V vocabulary, X a selection out of another
# dimension.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import cpu_kernels_for


def embed(token_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Return x_TD = weight_VD[token_T] as a new tensor.

    Args:
        token_T: int64, in [0, V); not range-checked on a CPU.
    """
    kernels = cpu_kernels_for(weight_VD)
    if kernels is None:
        return F.embedding(token_T, weight_VD)
    x_TD = weight_VD.new_empty((len(token_T), weight_VD.shape[1]))
    kernels.take_rows(weight_VD, token_T, x_TD)
    return x_TD


def take_rows(x: Tensor, index_X: Tensor) -> Tensor:
    """Return x[index_X] as a new tensor.

    Args:
        x: [T, ...], contiguous.
        index_X: of 32 or 64 bits, in [0, T); not range-checked on a CPU.
    """
    kernels = cpu_kernels_for(x)
    if kernels is None:
        return x[index_X]
    taken = x.new_empty((len(index_X), *x.shape[1:]))
    kernels.take_rows(x.flatten(1), index_X, taken.flatten(1))
    return taken
