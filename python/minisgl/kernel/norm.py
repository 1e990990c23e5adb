"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467)."""

# Dimensions: D model width, T tokens of a step, X a selection out of another dimension: parts of
# the inputs.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for, triton_kernels_for


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, computed in float32, in x's dtype.

    Rows of x may lie apart; a row is contiguous.
    """
    kernels = kernels_for(x_TD)
    if kernels is None:
        return rms_norm_reference(x_TD, weight_D, eps)
    y_TD = torch.empty_like(x_TD)
    kernels.rms_norm(x_TD, weight_D, eps, y_TD)
    return y_TD


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Add x to the residual, in place, and return the norm of the sum, in x's dtype.

    Rows of x may lie apart; the residual is contiguous.
    """
    kernels = kernels_for(x_TD)
    if kernels is None:
        return rms_norm_reference(residual_TD.add_(x_TD), weight_D, eps)
    y_TD = torch.empty_like(x_TD)
    kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps, y_TD)
    return y_TD


def parts_rms_norm(parts_XTD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add up all parts of x and return the norm of the sum.

    As `rms_norm`, but for x in parts (`gpu_linear_in_parts`), whose sum is not rounded.

    Args:
        parts_XTD: contiguous float32.
        dtype: of the norm.
    """
    kernels = triton_kernels_for(parts_XTD)
    if kernels is None:
        return rms_norm_reference(parts_XTD.sum(dim=0), weight_D, eps).to(dtype)
    y_TD = torch.empty_like(parts_XTD[0], dtype=dtype)
    kernels.parts_rms_norm(parts_XTD, weight_D, eps, y_TD)
    return y_TD


def add_parts_rms_norm(
    parts_XTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> Tensor:
    """Add all parts of x to the residual, in place, and return the norm of the sum.

    As `add_rms_norm`, but for x in parts (`gpu_linear_in_parts`). Their sum is rounded only once it
    is added to the residual.

    Args:
        parts_XTD: contiguous float32.
    """
    kernels = triton_kernels_for(parts_XTD)
    if kernels is None:
        residual_TD.copy_(parts_XTD.sum(dim=0) + residual_TD)
        return rms_norm_reference(residual_TD, weight_D, eps)
    y_TD = torch.empty_like(residual_TD)
    kernels.add_parts_rms_norm(parts_XTD, residual_TD, weight_D, eps, y_TD)
    return y_TD


def residual_norm(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and norm the sum.

    Args:
        residual_TD: overwritten with the sum; None stands for zero.

    Returns:
        normed_TD, and the sum.
    """
    if residual_TD is None:
        return rms_norm(x_TD, weight_D, eps), x_TD
    return add_rms_norm(x_TD, residual_TD, weight_D, eps), residual_TD


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute what `rms_norm` does, in plain torch, for any leading shape."""
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(dim=-1, keepdim=True) + eps)
    return (x_float * scale * weight_D.float()).to(x.dtype)
