"""Root-mean-square norm."""

# Dimension key: T tokens in the batch, D width of the normalised dimension.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32, output in x's dtype.

    torch computes its own `rms_norm` on a CPU in eight small steps. The layer norm of (x, -x), whose mean is zero and
    whose variance is the mean of x^2, is the same in one, and for the few tokens of a decode twice as fast.
    """
    width = x_TD.shape[-1]
    if x_TD.is_cuda:
        return F.rms_norm(x_TD, (width,), weight_D, eps)
    mirrored = torch.cat((x_TD, x_TD.neg()), dim=-1)
    return F.layer_norm(mirrored, (2 * width,), eps=eps)[..., :width] * weight_D
