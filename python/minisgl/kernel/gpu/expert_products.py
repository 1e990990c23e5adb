"""Products of the blocks of `expert_pairs.py` with the weights of their experts.

A program multiplies a block with a tile of its expert's rows, then the next tile. Where it can, it
lets TMA (the copy unit of Hopper and later) copy the tiles.

On Hopper Triton fuses the two loops of a program: it loads the next tile while it finishes the last
one. In the fused loop, the inner loop and the code after it see the outer loop's variables of the
next tile. So neither reads these. The inputs of the inner loop are computed from them beforehand,
and pairs are loaded where they are needed, before and after it.
"""

# Dimensions: E experts, I inputs of a linear layer, O outputs of a linear layer, X a selection out
# of another dimension, Z entries of a flat list.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.expert_tiles import ProductTile
from minisgl.kernel.gpu.expert_pairs import PairBlocks
from minisgl.kernel.gpu.launch import RememberedKernel, has_tma, pdl, wait_for_inputs

_LEAST_PAIRS_BY_TMA = 64  # as many as one instruction multiplies by what TMA has copied
_ALIGNED_INPUTS = 16  # to what Triton aligns numbers; TMA needs half of it


def multiply_blocks(
    x: Tensor,
    weight_EOI: Tensor,
    blocks: PairBlocks,
    y: Tensor,
    tile: ProductTile,
    *,
    each: int | None = None,
) -> None:
    """Multiply the row of each pair with its expert's weight.

    Args:
        x: with `each`, the experts that a token chooses, it has a row per token, and the weight is
            that of gate and up. Otherwise it has a row for each place of the blocks.
        y: with `each`, silu(gate) * up for each place of the blocks; otherwise a row per pair.
    """
    num_rows, inputs = weight_EOI.shape[1:]
    most_blocks = len(blocks.expert_X)
    num_tiles = most_blocks * -(-num_rows // tile.rows)
    grid = (min(num_tiles, tile.programs),)
    is_gated = each is not None
    pairs = len(blocks.pair_Z) // most_blocks
    row_inputs = tile.row_bytes // x.itemsize
    options = {
        "EACH": each or 1,
        "IS_GATED": is_gated,
        "PAIRS": pairs,
        "ROWS": tile.rows,
        "INPUTS": row_inputs,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **pdl(x),
    }
    if pairs >= _LEAST_PAIRS_BY_TMA and _takes_tma(weight_EOI):
        if is_gated:
            halves = weight_EOI.view(-1, num_rows // 2, inputs)
            weight = TensorDescriptor.from_tensor(halves, [2, tile.rows // 2, row_inputs])
            read_x = x
        else:
            rows = weight_EOI.view(-1, inputs)
            weight = TensorDescriptor.from_tensor(rows, [tile.rows, row_inputs])
            read_x = TensorDescriptor.from_tensor(x, [pairs, row_inputs])
        _multiply_by_tma[grid](
            read_x, weight, *blocks, y, inputs, y.shape[1], x.stride(0), **options
        )
    else:
        _multiply[grid](
            x, weight_EOI, *blocks, y, inputs, y.shape[1],
            x.stride(0), weight_EOI.stride(0), weight_EOI.stride(1), **options,
        )  # fmt: skip


def _takes_tma(weight_EOI: Tensor) -> bool:
    """Whether TMA can copy tiles of a weight, and of inputs whose rows lie side by side."""
    if not has_tma(weight_EOI) or weight_EOI.itemsize != 2:
        return False
    return weight_EOI.is_contiguous() and weight_EOI.shape[2] % _ALIGNED_INPUTS == 0


@triton.jit
def _store_tile(y, acc, pairs, place, o, outputs, IS_GATED: tl.constexpr):
    """Store outputs o of a block: in the order of the blocks if gated, otherwise a row per pair.

    If gated, acc has gate and up side by side: [pairs, outputs, 2]. Otherwise: [pairs, outputs].
    """
    mask = (o < outputs)[None, :]
    if IS_GATED:
        gate, up = tl.split(acc)
        value = gate * tl.sigmoid(gate) * up
        target = place  # without a pair, too: the second product reads whole blocks
    else:
        value = acc
        target = tl.load(pairs + place).to(tl.int64)
        mask = mask & (target >= 0)[:, None]
    y_rows = y + target[:, None] * outputs
    tl.store(y_rows + o[None, :], value.to(y.dtype.element_ty), mask=mask)


@RememberedKernel
@triton.jit
def _multiply(
    x, weight, pairs, block_expert, num_blocks, y, inputs, outputs,
    stride_x, stride_expert, stride_row,
    EACH: tl.constexpr, IS_GATED: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply each block of pairs with the weight of its expert, a tile of its rows at a time.

    If gated, x has a row per token, and y gets silu(gate) * up in the order of the blocks.
    Otherwise x is in this order, and y gets a row per pair. The block of a tile is read one tile
    ahead.
    """
    i = tl.arange(0, INPUTS)
    num_rows = 2 * outputs if IS_GATED else outputs
    num_columns = tl.cdiv(num_rows, ROWS)
    wait_for_inputs(PDL)
    num_tiles = tl.load(num_blocks) * num_columns
    next_block = tl.program_id(0) // num_columns
    next_e = tl.load(block_expert + next_block)
    if IS_GATED:
        next_j = tl.load(pairs + next_block * PAIRS + tl.arange(0, PAIRS))
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=PDL):
        block = tile // num_columns
        column = tile % num_columns
        e = next_e.to(tl.int64)
        next_block = min(tile + tl.num_programs(0), num_tiles - 1) // num_columns
        next_e = tl.load(block_expert + next_block)
        place = block.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        r = column * ROWS + tl.arange(0, ROWS)
        if IS_GATED:  # rows of gate and of up take turns, so that a thread has both
            row = tl.where(r < num_rows, r // 2 + r % 2 * outputs, 0)
            o = column * (ROWS // 2) + tl.arange(0, ROWS // 2)
            source = tl.maximum(next_j, 0).to(tl.int64) // EACH
            next_j = tl.load(pairs + next_block * PAIRS + tl.arange(0, PAIRS))
        else:
            row = tl.where(r < num_rows, r, 0)
            o = r
            source = place
        x_rows = x + source[:, None] * stride_x + i[None, :]
        w_rows = weight + e * stride_expert + row[None, :] * stride_row + i[:, None]
        acc = tl.zeros((PAIRS, ROWS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            inside = begin + i < inputs
            a = tl.load(x_rows + begin, mask=inside[None, :], other=0.0)
            b = tl.load(w_rows + begin, mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if IS_GATED:
            acc = acc.reshape(PAIRS, ROWS // 2, 2)
        _store_tile(y, acc, pairs, place, o, outputs, IS_GATED)


@RememberedKernel
@triton.jit
def _multiply_by_tma(
    x, weight, pairs, block_expert, num_blocks, y, inputs, outputs, stride_x,
    EACH: tl.constexpr, IS_GATED: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_multiply`; weights, and an x in the order of the blocks, are descriptors of TMA.

    A tile of gate and up has some rows of gate, then as many of up.
    """
    i = tl.arange(0, INPUTS)
    OUTPUTS: tl.constexpr = ROWS // 2 if IS_GATED else ROWS  # of a tile
    num_columns = tl.cdiv(outputs, OUTPUTS)
    wait_for_inputs(PDL)
    num_tiles = tl.load(num_blocks) * num_columns
    next_block = tl.program_id(0) // num_columns
    next_e = tl.load(block_expert + next_block)
    if IS_GATED:
        next_j = tl.load(pairs + next_block * PAIRS + tl.arange(0, PAIRS))
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=PDL):
        block = tile // num_columns
        first_place = block * PAIRS
        first_output = tile % num_columns * OUTPUTS
        e = next_e
        first_half = e * 2
        first_row = e * outputs + first_output
        next_block = min(tile + tl.num_programs(0), num_tiles - 1) // num_columns
        next_e = tl.load(block_expert + next_block)
        place = block.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        if IS_GATED:
            source = tl.maximum(next_j, 0).to(tl.int64) // EACH
            x_rows = x + source[:, None] * stride_x + i[None, :]
            next_j = tl.load(pairs + next_block * PAIRS + tl.arange(0, PAIRS))
        acc = tl.zeros((PAIRS, ROWS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            if IS_GATED:
                a = tl.load(x_rows + begin, mask=(begin + i < inputs)[None, :], other=0.0)
                b = weight.load([first_half, first_output, begin]).reshape(ROWS, INPUTS)
            else:
                a = x.load([first_place, begin])
                b = weight.load([first_row, begin])
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        o = first_output + tl.arange(0, OUTPUTS)
        if IS_GATED:
            acc = acc.reshape(PAIRS, 2, OUTPUTS).permute(0, 2, 1)
        _store_tile(y, acc, pairs, place, o, outputs, IS_GATED)
