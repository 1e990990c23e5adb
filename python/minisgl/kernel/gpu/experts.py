"""Mixture of experts whose routing stays on the device: the host never reads it.

`moe_by_token` reads an expert's weight for each token that chose it, row by row as
`one_token_linear` does. `moe_by_expert` sorts the pairs of a token and an expert by experts, in
blocks of one expert each. Then programs multiply blocks with tiles of the weights, tile after tile.
How many blocks there are is known on the device alone, so the launches can be captured in a CUDA
graph. `moe/fused.py` chooses between the two, and `moe/tiles.py` the sizes of tiles.

A pair whose expert is on another rank has a number outside [0, E). It has a place in the grids, but
its programs end at once, and it is in no block.
"""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# I inputs of a linear layer, J pairs of a token and an expert it chose,
# O outputs of a linear layer, T tokens of a step, U both halves of a gated mlp: 2 F,
# X a selection out of another dimension, Z entries of a flat list.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.expert_tiles import MOST_PAIRS_AT_ONCE, ExpertTiles, ProductTile
from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs
from minisgl.kernel.gpu.linear import products

# By token, at a time: rows of gate and up, numbers of such a row, numbers of rows of down.
_ROWS = 4
_BLOCK = 1024
_DOWN_NUMBERS = 4096
_CHUNK_PAIRS = 2048  # that are counted at a time, if there are more than MOST_PAIRS_AT_ONCE
_LEAST_BINS = 128  # so many experts or fewer are counted by one variant
_MOST_BLOCK_SIZE = 512


class PairBlocks(NamedTuple):
    """Pairs sorted by experts, in blocks of one expert each. All numbers are int32.

    Attributes:
        pair_Z: block after block. -1 fills the last block of an expert; what follows the last
            block of all is not written.
        expert_X: of each block.
        num_blocks_1: how many there are.
    """

    pair_Z: Tensor
    expert_X: Tensor
    num_blocks_1: Tensor


@RememberedKernel
@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["weight", "expert"])
def _route(
    logits, weight, expert, stride_logits, num_experts, first,
    EACH: tl.constexpr, EACH_2: tl.constexpr, EXPERTS_2: tl.constexpr, NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Choose EACH experts of a token, one after the other; `first` gets the number 0."""
    t = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, EACH_2)
    e = tl.arange(0, EXPERTS_2)
    wait_for_inputs(PDL)
    row = logits + t * stride_logits
    left = tl.load(row + e, mask=e < num_experts, other=-float("inf")).to(tl.float32)
    top = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - top), axis=0)
    chosen = tl.zeros((EACH_2,), tl.int32)
    value = tl.zeros((EACH_2,), tl.float32)
    for choice in range(EACH):
        highest = tl.max(left, axis=0)
        # Logits that are all NaN have no best expert; the result is a valid id even then.
        best = tl.min(tl.where(left == highest, e, num_experts - 1), axis=0)
        chosen = tl.where(a == choice, best, chosen)
        value = tl.where(a == choice, tl.exp(highest - top), value)
        left = tl.where(e == best, -float("inf"), left)
    if NORMALIZE:
        total = tl.sum(value, axis=0)
    tl.store(weight + t * EACH + a, (value / total).to(weight.dtype.element_ty), mask=a < EACH)
    tl.store(expert + t * EACH + a, chosen - first, mask=a < EACH)


def route(
    logits_TE: Tensor, weight_TA: Tensor, expert_TA: Tensor, normalize: bool, first: int
) -> None:
    tokens, num_experts = logits_TE.shape
    each = weight_TA.shape[1]
    if tokens == 0:
        return
    _route[(tokens,)](
        logits_TE, weight_TA, expert_TA, logits_TE.stride(0), num_experts, first,
        EACH=each, EACH_2=next_power_of_2(each),
        EXPERTS_2=next_power_of_2(num_experts),
        NORMALIZE=normalize, num_warps=1, **pdl(logits_TE),
    )  # fmt: skip


@RememberedKernel
@triton.jit(do_not_specialize=["num_experts"], do_not_specialize_on_alignment=["expert"])
def _gate_up_rows(
    x, weight, expert, h, num_experts, width, mlp_width, stride_x, stride_expert, stride_row,
    EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[j] = silu(gate) * up for some of the mlp's columns f, of one pair j.

    Row u of the program's is row u // 2 of gate or of up in turns, so that `tl.split` parts them.
    """
    j = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    u = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (u < 2 * mlp_width)[:, None]
    wait_for_inputs(PDL)
    e = tl.load(expert + j).to(tl.int64)
    width = tl.where((e >= 0) & (e < num_experts), width, 0)  # nothing is read for another rank's
    rows = weight + e * stride_expert
    rows += (u // 2 + u % 2 * mlp_width)[:, None] * stride_row
    w = tl.load(rows + d, mask=inside & (d < width), other=0.0)
    total = products(w, rows, x + j // EACH * stride_x, inside, True, width, BLOCK)
    gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
    f = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h + j * mlp_width + f, value.to(h.dtype.element_ty), mask=f < mlp_width)


@RememberedKernel
@triton.jit(do_not_specialize=["num_experts"], do_not_specialize_on_alignment=["scale", "expert"])
def _down_rows(
    h, weight, scale, expert, y, num_experts, mlp_width, width, stride_expert, stride_row,
    EACH: tl.constexpr, EACH_2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[t, d]: the weighted sum of row d of each of the token's experts that are here.

    The ids of the experts, and the weights, need no wait here. The kernel before this one waited
    for them before it let this one start.
    """
    d = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    a = tl.arange(0, EACH_2)
    f = tl.arange(0, BLOCK)[None, :]
    j = t * EACH + tl.minimum(a, EACH - 1)
    chosen = tl.load(expert + j, cache_modifier=".cg").to(tl.int64)
    inside = ((a < EACH) & (chosen >= 0) & (chosen < num_experts))[:, None]
    rows = weight + chosen[:, None] * stride_expert + d * stride_row
    w = tl.load(rows + f, mask=inside & (f < mlp_width), other=0.0)
    wait_for_inputs(PDL)
    total = products(w, rows, h + j[:, None] * mlp_width, inside, inside, mlp_width, BLOCK)
    result = tl.sum(total * tl.load(scale + j).to(tl.float32), axis=0)
    tl.store(y + t * width + d, result.to(y.dtype.element_ty))


@RememberedKernel
@triton.jit(do_not_specialize=["num_pairs"])
def _sort_few_pairs(
    expert, pairs, block_expert, num_blocks, num_pairs, num_experts, block_size,
    MOST_PAIRS: tl.constexpr, BINS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one expert, and its pairs to their places."""
    e = tl.program_id(0)
    j = tl.arange(0, MOST_PAIRS)
    wait_for_inputs(PDL)
    chosen = tl.load(expert + j, mask=j < num_pairs, other=-1).to(tl.int32)
    total = tl.histogram(chosen, BINS, mask=(chosen >= 0) & (chosen < BINS))
    first = _write_blocks(
        e, total, pairs, block_expert, num_blocks, num_experts, block_size, BINS, MOST
    )
    is_match = chosen == e
    place = first + tl.cumsum(is_match.to(tl.int32), axis=0) - 1
    tl.store(pairs + place, j, mask=is_match)


@RememberedKernel
@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(
    expert, count, num_pairs, CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr
):
    """Count each expert's pairs in a chunk."""
    c = tl.program_id(0)
    j = c * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    chosen = tl.load(expert + j, mask=j < num_pairs, other=-1).to(tl.int32)
    counts = tl.histogram(chosen, BINS, mask=(chosen >= 0) & (chosen < BINS))
    tl.store(count + c * BINS + tl.arange(0, BINS), counts)


@RememberedKernel
@triton.jit(do_not_specialize=["num_chunks"])
def _place_experts(
    count, first, pairs, block_expert, num_blocks, num_chunks, num_experts, block_size,
    BINS: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one expert, and the place of its first pair in each chunk."""
    e = tl.program_id(0)
    b = tl.arange(0, BINS)
    wait_for_inputs(PDL)
    total = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_chunks, CHUNKS):
        k = begin + tl.arange(0, CHUNKS)
        counts = tl.load(count + k[:, None] * BINS + b, mask=(k < num_chunks)[:, None], other=0)
        total += tl.sum(counts, axis=0)
    place = _write_blocks(
        e, total, pairs, block_expert, num_blocks, num_experts, block_size, BINS, MOST
    )
    for begin in range(0, num_chunks, CHUNKS):
        k = begin + tl.arange(0, CHUNKS)
        own = tl.load(count + k * BINS + e, mask=k < num_chunks, other=0)
        tl.store(first + k * BINS + e, place + tl.cumsum(own, axis=0) - own, mask=k < num_chunks)
        place += tl.sum(own, axis=0)


@RememberedKernel
@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs(
    expert, first, pairs, num_pairs,
    CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one expert in one chunk to their places."""
    e = tl.program_id(0)
    c = tl.program_id(1)
    j = c * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs(PDL)
    is_match = tl.load(expert + j, mask=j < num_pairs, other=-1).to(tl.int32) == e
    place = tl.load(first + c * BINS + e) + tl.cumsum(is_match.to(tl.int32), axis=0) - 1
    tl.store(pairs + place, j, mask=is_match)


@triton.jit
def _write_blocks(
    e, total, pairs, block_expert, num_blocks, num_experts, block_size,
    BINS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write whose the blocks of an expert are, and -1 to the rest of its last one.

    They follow those of all experts before it. The last expert writes how many there are. `total`
    has the pairs of each expert. Returns the place of this one's first pair.
    """
    b = tl.arange(0, BINS)
    m = tl.arange(0, MOST)
    first_block = tl.sum(tl.where(b < e, tl.cdiv(total, block_size), 0), axis=0)
    num_own = tl.sum(tl.where(b == e, total, 0), axis=0)
    own_blocks = tl.cdiv(num_own, block_size)
    first_place = first_block * block_size
    rest = pairs + first_place + num_own
    tl.store(rest + m, -1, mask=num_own + m < own_blocks * block_size)
    for begin in range(0, own_blocks, MOST):
        x = begin + m
        tl.store(block_expert + first_block + x, e, mask=x < own_blocks)
    if e == num_experts - 1:
        tl.store(num_blocks, first_block + own_blocks)
    return first_place


def sort_pairs(expert_TA: Tensor, num_experts: int, block_size: int) -> PairBlocks:
    """Sort the pairs of experts that are here by experts, those of one in ascending order.

    Args:
        block_size: pairs of a block; at most 512.
    """
    num_pairs = expert_TA.numel()
    most_blocks = num_pairs // block_size + min(num_experts, num_pairs)
    blocks = PairBlocks(
        _ints(most_blocks * block_size, expert_TA),
        _ints(most_blocks, expert_TA),
        _ints(1, expert_TA),
    )
    bins = max(next_power_of_2(num_experts), _LEAST_BINS)
    if num_pairs <= MOST_PAIRS_AT_ONCE:
        _sort_few_pairs[(num_experts,)](
            expert_TA, *blocks, num_pairs, num_experts, block_size,
            MOST_PAIRS=MOST_PAIRS_AT_ONCE, BINS=bins, MOST=_MOST_BLOCK_SIZE,
            num_warps=8, **pdl(expert_TA),
        )  # fmt: skip
        return blocks
    num_chunks = -(-num_pairs // _CHUNK_PAIRS)
    count = _ints(num_chunks * bins, expert_TA)
    first = torch.empty_like(count)
    options = pdl(expert_TA)
    _count_pairs[(num_chunks,)](
        expert_TA, count, num_pairs, CHUNK=_CHUNK_PAIRS, BINS=bins, num_warps=4, **options
    )
    _place_experts[(num_experts,)](
        count, first, *blocks, num_chunks, num_experts, block_size,
        BINS=bins, CHUNKS=16, MOST=_MOST_BLOCK_SIZE, num_warps=4, **options,
    )  # fmt: skip
    _place_pairs[(num_experts, num_chunks)](
        expert_TA, first, blocks.pair_Z, num_pairs,
        CHUNK=_CHUNK_PAIRS, BINS=bins, num_warps=4, **options,
    )  # fmt: skip
    return blocks


def _ints(num: int, like: Tensor) -> Tensor:
    return torch.empty(num, dtype=torch.int32, device=like.device)


@RememberedKernel
@triton.jit
def _multiply(
    x, weight, pairs, block_expert, num_blocks, y, inputs, outputs,
    stride_x, stride_expert, stride_row,
    EACH: tl.constexpr, IS_GATED: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply each block of pairs with the weight of its expert, a tile of its rows at a time.

    If gated, x has a row a token, and y gets silu(gate) * up in the order of the blocks. Otherwise
    x is in this order, and y gets a row a pair. On Hopper the two loops are one: a program loads
    its next tile while it ends the last one. The block of a tile is read a tile before.

    What follows the inner loop must not read what the outer loop carries: Triton gives it the next
    tile's values there. So pairs are loaded where they are needed, on either side of that loop.
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
        mask = (o < outputs)[None, :]
        if IS_GATED:
            gate, up = tl.split(tl.reshape(acc, (PAIRS, ROWS // 2, 2)))
            value = gate * tl.sigmoid(gate) * up
            target = place  # without a pair, too: the second product reads whole blocks
        else:
            value = acc
            target = tl.load(pairs + place).to(tl.int64)
            mask = mask & (target >= 0)[:, None]
        y_rows = y + target[:, None] * outputs
        tl.store(y_rows + o[None, :], value.to(y.dtype.element_ty), mask=mask)


@RememberedKernel
@triton.jit(do_not_specialize=["num_experts"], do_not_specialize_on_alignment=["scale", "expert"])
def _sum_of_pairs(
    y, scale, expert, total, num_experts, width,
    EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total[t] = sum of scale[j] * y[j] over the pairs j of a token that were multiplied here."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    wait_for_inputs(PDL)
    for a in tl.static_range(EACH):
        j = t * EACH + a
        chosen = tl.load(expert + j)
        columns = tl.where((chosen >= 0) & (chosen < num_experts), width, 0)
        value = tl.load(y + j * width + d, mask=d < columns, other=0.0)
        acc += value.to(tl.float32) * tl.load(scale + j).to(tl.float32)
    tl.store(total + t * width + d, acc.to(total.dtype.element_ty), mask=d < width)


def moe_by_expert(
    x_TD: Tensor,
    gate_up_EUD: Tensor,
    down_EDF: Tensor,
    weight_TA: Tensor,
    expert_TA: Tensor,
    y_TD: Tensor,
    tiles: ExpertTiles,
) -> None:
    tokens, width = x_TD.shape
    if tokens == 0:
        return
    blocks = sort_pairs(expert_TA, len(down_EDF), tiles.pairs)
    each = expert_TA.shape[1]
    h_ZF = x_TD.new_empty(len(blocks.pair_Z), down_EDF.shape[2])
    multiply_blocks(x_TD, gate_up_EUD, blocks, h_ZF, tiles.gate_up, each=each)
    y_JD = x_TD.new_empty(expert_TA.numel(), width)
    multiply_blocks(h_ZF, down_EDF, blocks, y_JD, tiles.down)
    grid = (tokens, -(-width // _BLOCK))
    _sum_of_pairs[grid](
        y_JD, weight_TA, expert_TA, y_TD, len(down_EDF), width,
        EACH=each, BLOCK=_BLOCK, **pdl(x_TD),
    )  # fmt: skip


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
        x: with `each`, the experts that a token chooses, it has a row a token, and the weight is
            that of gate and up. Otherwise it has a row for each place of the blocks.
        y: with `each`, silu(gate) * up for each place of the blocks; otherwise a row a pair.
    """
    num_rows, inputs = weight_EOI.shape[1:]
    most_blocks = len(blocks.expert_X)
    num_tiles = most_blocks * -(-num_rows // tile.rows)
    _multiply[(min(num_tiles, tile.programs),)](
        x, weight_EOI, *blocks, y, inputs, y.shape[1],
        x.stride(0), weight_EOI.stride(0), weight_EOI.stride(1),
        EACH=each or 1, IS_GATED=each is not None,
        PAIRS=len(blocks.pair_Z) // most_blocks, ROWS=tile.rows,
        INPUTS=tile.row_bytes // x.itemsize,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(x),
    )  # fmt: skip


def moe_by_token(
    x_TD: Tensor,
    gate_up_EUD: Tensor,
    down_EDF: Tensor,
    weight_TA: Tensor,
    expert_TA: Tensor,
    y_TD: Tensor,
) -> None:
    tokens, width = x_TD.shape
    if tokens == 0:
        return
    num_pairs = expert_TA.numel()
    mlp_width = down_EDF.shape[2]
    h_JF = x_TD.new_empty(num_pairs, mlp_width)
    each = expert_TA.shape[1]
    each_2 = next_power_of_2(each)
    _gate_up_rows[(-(-(2 * mlp_width) // _ROWS), num_pairs)](
        x_TD, gate_up_EUD, expert_TA, h_JF, len(gate_up_EUD), width, mlp_width,
        x_TD.stride(0), gate_up_EUD.stride(0), gate_up_EUD.stride(1),
        EACH=each, ROWS=_ROWS, BLOCK=_BLOCK, **pdl(x_TD),
    )  # fmt: skip
    _down_rows[(width, tokens)](
        h_JF, down_EDF, weight_TA, expert_TA, y_TD, len(down_EDF), mlp_width, width,
        down_EDF.stride(0), down_EDF.stride(1),
        EACH=each, EACH_2=each_2,
        BLOCK=min(next_power_of_2(mlp_width), _DOWN_NUMBERS // each_2), **pdl(x_TD),
    )  # fmt: skip
