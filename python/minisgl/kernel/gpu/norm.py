"""Root-mean-square norm, with or without a residual: a program for each row.

A row may be in parts that are still to be added up.
"""

# Dimensions: D model width, T tokens of a step, X a selection out of another dimension: parts of
# the inputs.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, start_next_and_wait


@RememberedKernel
@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    y,
    stride_x,
    stride_part,
    width,
    eps,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < width
    scale = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    row = x + t * stride_x
    value = tl.load(row + d, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(row + part * stride_part + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + t * width + d, mask=mask, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + t * width + d, total, mask=mask)
        value = total.to(tl.float32)
    rms = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(y + t * width + d, (value * rms * scale).to(y.dtype.element_ty), mask=mask)


def _launch(
    x_XTD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, y_TD: Tensor
) -> None:
    parts, tokens, width = x_XTD.shape
    if tokens == 0:
        return
    block = next_power_of_2(width)
    residual = x_XTD if residual_TD is None else residual_TD
    stride_part = x_XTD.stride(0) if parts > 1 else 0
    _rms_norm[(tokens,)](
        x_XTD, residual, weight_D, y_TD, x_XTD.stride(1), stride_part, width, eps,
        PARTS=parts, HAS_RESIDUAL=residual_TD is not None, BLOCK=block,
        num_warps=min(8, max(1, block // 512)), **pdl(x_XTD),
    )  # fmt: skip


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor) -> None:
    _launch(x_TD.unsqueeze(0), None, weight_D, eps, y_TD)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor
) -> None:
    _launch(x_TD.unsqueeze(0), residual_TD, weight_D, eps, y_TD)


def parts_rms_norm(parts_XTD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor) -> None:
    _launch(parts_XTD, None, weight_D, eps, y_TD)


def add_parts_rms_norm(
    parts_XTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor
) -> None:
    _launch(parts_XTD, residual_TD, weight_D, eps, y_TD)
