"""Products of some tokens with a weight, in the small tiles of `kernel/linear_tiles.py`.

A program multiplies a tile of tokens with a tile of the weight's rows. Several stages of copies are
on their way while it does. Where the inputs are divided, each part of a sum is written in float32,
and the norm that reads the sum adds them up (`norm.py`).
"""

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
# step, U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, pdl, wait_for_inputs
from minisgl.kernel.linear_tiles import LinearTile

_NUM_WARPS = 4
_NUM_WARPS_OF_LONG = 8  # 128 tokens
# Of 16 tokens and 64 outputs of gate and up fewer warps keep numbers in memory.
_NUM_WARPS_OF_FEW_GATED = 8


@RememberedKernel
@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_linear(
    x, weight, bias, y, num_tokens, inputs, part_inputs, outputs, stride_x,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has a tile of outputs, a tile of tokens and a part of the inputs."""
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    i = part * part_inputs + tl.arange(0, INPUTS)
    x_tile = x + t[:, None] * stride_x + i[None, :]
    w_tile = weight + o.to(tl.int64)[:, None] * inputs + i[None, :]
    has_token = (t < num_tokens)[:, None]
    has_row = (o < outputs)[:, None]
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    wait_for_inputs(PDL)
    for _ in tl.range(0, part_inputs, INPUTS, num_stages=STAGES):
        x_block = tl.load(x_tile, mask=has_token, other=0.0)
        w_block = tl.load(w_tile, mask=has_row, other=0.0)
        total = tl.dot(x_block, w_block.trans(), total)
        x_tile += INPUTS
        w_tile += INPUTS
    if HAS_BIAS:  # at the end, as products that begin with the bias are slower
        bias_o = tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)
        total += tl.where(part == 0, bias_o, 0.0)[None, :]
    row = part * num_tokens + t
    inside = has_token & (o < outputs)[None, :]
    tl.store(y + row[:, None] * outputs + o[None, :], total.to(y.dtype.element_ty), mask=inside)


def tiled_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tile: LinearTile
) -> Tensor:
    """Return parts_XTO, whose sum is y_TO. One part is in x's dtype, several are in float32."""
    num_tokens, inputs = x_TI.shape
    outputs = len(weight_OI)
    dtype = torch.float32 if tile.parts > 1 else x_TI.dtype
    parts_XTO = x_TI.new_empty((tile.parts, num_tokens, outputs), dtype=dtype)
    grid = (-(-outputs // tile.outputs), -(-num_tokens // tile.tokens), tile.parts)
    _tiled_linear[grid](
        x_TI, weight_OI, weight_OI if bias_O is None else bias_O, parts_XTO,
        num_tokens, inputs, inputs // tile.parts, outputs, x_TI.stride(0),
        HAS_BIAS=bias_O is not None,
        TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs, STAGES=tile.stages,
        num_warps=_NUM_WARPS_OF_LONG if tile.tokens > 64 else _NUM_WARPS, **pdl(x_TI),
    )  # fmt: skip
    return parts_XTO


@RememberedKernel
@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_gated(
    x, weight, y, num_tokens, inputs, outputs, stride_x,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has a tile of outputs: rows of the gate, and those of up that belong to them."""
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    i = tl.arange(0, INPUTS)
    x_tile = x + t[:, None] * stride_x + i[None, :]
    gate_tile = weight + o.to(tl.int64)[:, None] * inputs + i[None, :]
    to_up = tl.cast(outputs, tl.int64) * inputs
    has_token = (t < num_tokens)[:, None]
    has_row = (o < outputs)[:, None]
    gate = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    up = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    wait_for_inputs(PDL)
    for _ in tl.range(0, inputs, INPUTS, num_stages=STAGES):
        x_block = tl.load(x_tile, mask=has_token, other=0.0)
        gate = tl.dot(x_block, tl.load(gate_tile, mask=has_row, other=0.0).trans(), gate)
        up = tl.dot(x_block, tl.load(gate_tile + to_up, mask=has_row, other=0.0).trans(), up)
        x_tile += INPUTS
        gate_tile += INPUTS
    gate = gate.to(y.dtype.element_ty).to(tl.float32)  # as if they were stored
    up = up.to(y.dtype.element_ty).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    inside = has_token & (o < outputs)[None, :]
    tl.store(y + t[:, None] * outputs + o[None, :], value.to(y.dtype.element_ty), mask=inside)


def tiled_silu(x_TI: Tensor, weight_UI: Tensor, tile: LinearTile) -> Tensor:
    """Return silu(gate) * up."""
    num_tokens, inputs = x_TI.shape
    outputs = len(weight_UI) // 2
    y_TF = x_TI.new_empty((num_tokens, outputs))
    is_few = tile.outputs > 2 * tile.tokens
    grid = (-(-outputs // tile.outputs), -(-num_tokens // tile.tokens))
    _tiled_gated[grid](
        x_TI, weight_UI, y_TF, num_tokens, inputs, outputs, x_TI.stride(0),
        TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs, STAGES=tile.stages,
        num_warps=_NUM_WARPS_OF_FEW_GATED if is_few else _NUM_WARPS, **pdl(x_TI),
    )  # fmt: skip
    return y_TF
