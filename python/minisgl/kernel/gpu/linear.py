"""The product of one token with a weight, which is bound by reading the weight.

A program has a few rows of the weight and asks for them before it waits for the token, so that the memory is busy
while the kernel before it ends. A library's product is made for many tokens, and reads at half the speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_ROWS = 2
_BLOCK = 1024


@triton.jit
def products(w, rows, x, inside, inputs, BLOCK: tl.constexpr):
    """Each of the rows times x, or times its own row of x; `w` is the rows' first block."""
    i = tl.arange(0, BLOCK)[None, :]
    total = w.to(tl.float32) * tl.load(x + i, mask=i < inputs, other=0.0).to(tl.float32)
    begin = BLOCK
    while begin < inputs:
        j = begin + i
        w = tl.load(rows + j, mask=inside & (j < inputs), other=0.0)
        total += w.to(tl.float32) * tl.load(x + j, mask=j < inputs, other=0.0).to(tl.float32)
        begin += BLOCK
    return tl.sum(total, axis=1)


@triton.jit
def _one_token_linear(
    x, weight, bias, y, inputs, outputs, stride_weight, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    rows = weight + f.to(tl.int64)[:, None] * stride_weight
    inside = (f < outputs)[:, None]
    w = tl.load(rows + i[None, :], mask=inside & (i < inputs)[None, :], other=0.0)
    wait_for_inputs(PDL)
    result = products(w, rows, x, inside, inputs, BLOCK)
    if HAS_BIAS:
        result += tl.load(bias + f, mask=f < outputs, other=0.0).to(tl.float32)
    tl.store(y + f, result.to(y.dtype.element_ty), mask=f < outputs)


def one_token_linear(x_1D: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    outputs, inputs = weight_FD.shape
    y_1F = torch.empty(1, outputs, dtype=x_1D.dtype, device=x_1D.device)
    _one_token_linear[(triton.cdiv(outputs, _ROWS),)](
        x_1D, weight_FD, weight_FD if bias_F is None else bias_F, y_1F, inputs, outputs, weight_FD.stride(0),
        HAS_BIAS=bias_F is not None, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4, **pdl(x_1D),
    )  # fmt: skip
    return y_1F
