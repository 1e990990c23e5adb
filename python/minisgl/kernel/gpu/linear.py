"""The product of one token with a weight, which is bound by reading the weight.

The gate and the up projection of an MLP have their activation in the same kernel.

A Triton program has a few rows of the weight, by `_tile`. It loads them before it waits for the
token, so that memory is busy while the previous kernel ends. A library's kernel is made for many
tokens, and reads at half the speed.
"""

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, U both halves of
# a gated mlp.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, num_processors, pdl, wait_for_inputs

# About: programs of the usual tile that a multiprocessor holds at a time.
_PROGRAMS = 10


class _Tile(NamedTuple):
    """What a program reads at a time.

    Attributes:
        rows: of the weight.
        block: inputs.
    """

    rows: int
    block: int
    num_warps: int


_USUAL = _Tile(2, 1024, 4)


def _tile(outputs: int, inputs: int, num_processors: int) -> _Tile:
    """The fastest tile of those that were measured on an H200, with weights of four models.

    Short rows take small programs. Other small weights take few large loads. Where a second wave of
    programs would be less than 60 % full, programs have more rows, so that there is none.
    """
    if inputs <= 1024:
        return _Tile(4, 512, 2)
    if outputs * inputs <= 1 << 22:
        return _Tile(4, 2048, 8)
    num_waves = outputs / (_USUAL.rows * _PROGRAMS * num_processors)
    return _Tile(4, 1024, 4) if 1 < num_waves < 1.6 else _USUAL


@triton.jit
def products(w, rows, x, inside, has_x, inputs, BLOCK: tl.constexpr):
    """The product of each row of a weight with x, or with the row of x that belongs to it.

    `w` holds the first block of the rows, which the caller loaded already. Rows that are not
    `inside`, and those of x that `has_x` lacks, are not read and count as zero.
    """
    i = tl.arange(0, BLOCK)[None, :]
    total = w.to(tl.float32) * tl.load(x + i, mask=has_x & (i < inputs), other=0.0).to(tl.float32)
    begin = BLOCK
    while begin < inputs:
        j = begin + i
        w = tl.load(rows + j, mask=inside & (j < inputs), other=0.0)
        value = tl.load(x + j, mask=has_x & (j < inputs), other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)
        begin += BLOCK
    return tl.sum(total, axis=1)


@RememberedKernel
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
    result = products(w, rows, x, inside, True, inputs, BLOCK)
    if HAS_BIAS:
        result += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)
    tl.store(y + o, result.to(y.dtype.element_ty), mask=o < outputs)


def one_token_linear(x_1I: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    outputs, inputs = weight_OI.shape
    tile = _tile(outputs, inputs, num_processors(x_1I))
    y_1O = torch.empty(1, outputs, dtype=x_1I.dtype, device=x_1I.device)
    _one_token_linear[(-(-outputs // tile.rows),)](
        x_1I, weight_OI, weight_OI if bias_O is None else bias_O, y_1O,
        inputs, outputs, weight_OI.stride(0), HAS_BIAS=bias_O is not None,
        ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps, **pdl(x_1I),
    )  # fmt: skip
    return y_1O


@RememberedKernel
@triton.jit
def _one_token_gated(
    x, weight, y, inputs, outputs, stride_weight,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each output is of a row of the gate and of the row of up that belongs to it."""
    in_tile = tl.arange(0, 2 * ROWS)
    first = tl.program_id(0) * ROWS
    output = first + in_tile // 2
    rows = weight + (output + in_tile % 2 * outputs).to(tl.int64)[:, None] * stride_weight
    inside = (output < outputs)[:, None]
    i = tl.arange(0, BLOCK)
    w = tl.load(rows + i[None, :], mask=inside & (i < inputs)[None, :], other=0.0)
    wait_for_inputs(PDL)
    result = products(w, rows, x, inside, True, inputs, BLOCK)
    result = result.to(y.dtype.element_ty).to(tl.float32)  # as if they were stored
    gate, up = tl.split(tl.reshape(result, (ROWS, 2)))
    f = first + tl.arange(0, ROWS)
    value = gate * tl.sigmoid(gate) * up
    tl.store(y + f, value.to(y.dtype.element_ty), mask=f < outputs)


def one_token_silu(x_1I: Tensor, weight_UI: Tensor) -> Tensor:
    num_rows, inputs = weight_UI.shape
    outputs = num_rows // 2
    tile = _tile(num_rows, inputs, num_processors(x_1I))
    rows = tile.rows // 2
    y_1F = torch.empty(1, outputs, dtype=x_1I.dtype, device=x_1I.device)
    _one_token_gated[(-(-outputs // rows),)](
        x_1I, weight_UI, y_1F, inputs, outputs, weight_UI.stride(0),
        ROWS=rows, BLOCK=tile.block, num_warps=tile.num_warps, **pdl(x_1I),
    )  # fmt: skip
    return y_1F
