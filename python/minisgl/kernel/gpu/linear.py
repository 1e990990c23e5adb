"""The product of one token with a weight, which is bound by reading the weight.

The gate and the up projection of an MLP have their activation in the same kernel.

A Triton program has a few rows of the weight. It loads them before it waits for the token, so that
memory is busy while the previous kernel ends. A library's kernel is made for many tokens, and reads
at half the speed.
"""

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, U both halves of
# a gated mlp.

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
    """The product of each row of a weight with x, or with the row of x that belongs to it.

    `w` holds the first block of the rows, which the caller loaded already.
    """
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
    x, weight, bias, y, inputs, outputs, stride_weight,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    rows = weight + o.to(tl.int64)[:, None] * stride_weight
    inside = (o < outputs)[:, None]
    w = tl.load(rows + i[None, :], mask=inside & (i < inputs)[None, :], other=0.0)
    wait_for_inputs(PDL)
    result = products(w, rows, x, inside, inputs, BLOCK)
    if HAS_BIAS:
        result += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)
    tl.store(y + o, result.to(y.dtype.element_ty), mask=o < outputs)


def one_token_linear(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    outputs, inputs = weight_OI.shape
    y_1O = torch.empty(1, outputs, dtype=x_1I.dtype, device=x_1I.device)
    _one_token_linear[(triton.cdiv(outputs, _ROWS),)](
        x_1I, weight_OI, weight_OI if bias_O is None else bias_O, y_1O,
        inputs, outputs, weight_OI.stride(0),
        HAS_BIAS=bias_O is not None, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4, **pdl(x_1I),
    )  # fmt: skip
    return y_1O


@triton.jit
def _one_token_gated(
    x, weight, y, inputs, outputs, stride_weight, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A program for one output, of a row of the gate and of the row of up that belongs to it."""
    f = tl.program_id(0)
    half = tl.arange(0, 2)
    i = tl.arange(0, BLOCK)
    rows = weight + (f + half.to(tl.int64)[:, None] * outputs) * stride_weight
    inside = (half < 2)[:, None]
    w = tl.load(rows + i[None, :], mask=(i < inputs)[None, :], other=0.0)
    wait_for_inputs(PDL)
    result = products(w, rows, x, inside, inputs, BLOCK)
    result = result.to(y.dtype.element_ty).to(tl.float32)  # as if they were stored
    gate = tl.sum(tl.where(half == 0, result, 0.0), axis=0)
    up = tl.sum(tl.where(half == 1, result, 0.0), axis=0)
    value = gate * tl.sigmoid(gate) * up
    tl.store(y + f, value.to(y.dtype.element_ty))


def one_token_silu(x_1I: Tensor, weight_UI: Tensor) -> Tensor:
    inputs = weight_UI.shape[1]
    outputs = len(weight_UI) // 2
    y_1F = torch.empty(1, outputs, dtype=x_1I.dtype, device=x_1I.device)
    _one_token_gated[(outputs,)](
        x_1I, weight_UI, y_1F, inputs, outputs, weight_UI.stride(0),
        BLOCK=_BLOCK, num_warps=4, **pdl(x_1I),
    )  # fmt: skip
    return y_1F
