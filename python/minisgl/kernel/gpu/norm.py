"""Root-mean-square norm, with or without a residual: a program for each row."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs


@RememberedKernel
@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    y,
    stride_x,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < width
    scale = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(x + t * stride_x + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + t * width + d, mask=mask, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + t * width + d, total, mask=mask)
        value = total.to(tl.float32)
    rms = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(y + t * width + d, (value * rms * scale).to(y.dtype.element_ty), mask=mask)


def _launch(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, y_TD: Tensor
) -> None:
    tokens, width = x_TD.shape
    if tokens == 0:
        return
    block = next_power_of_2(width)
    residual = x_TD if residual_TD is None else residual_TD
    _rms_norm[(tokens,)](
        x_TD, residual, weight_D, y_TD, x_TD.stride(0), width, eps,
        HAS_RESIDUAL=residual_TD is not None, BLOCK=block,
        num_warps=min(8, max(1, block // 512)), **pdl(x_TD),
    )  # fmt: skip


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor) -> None:
    _launch(x_TD, None, weight_D, eps, y_TD)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor
) -> None:
    _launch(x_TD, residual_TD, weight_D, eps, y_TD)
