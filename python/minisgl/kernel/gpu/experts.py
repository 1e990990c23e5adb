"""Mixture of experts whose routing stays on the device: the host never reads it.

`moe_by_token` reads an expert's weight for each token that chose it, row by row as
`one_token_linear` does. `moe_by_expert` first lists the tokens by expert. Then a program multiplies
a tile of an expert's weight with the tokens of that expert's list, or with every n-th block of the
list. So grids depend on the number of tokens alone, and the launches can be captured in a CUDA
graph. `moe/fused.py` chooses.
"""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# I inputs of a linear layer, J pairs of a token and an expert it chose,
# O outputs of a linear layer, T tokens of a step, U both halves of a gated mlp: 2 F.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs
from minisgl.kernel.gpu.linear import products

# By token, at a time: rows of gate and up, numbers of such a row, numbers of rows of down.
_ROWS = 4
_BLOCK = 1024
_DOWN_NUMBERS = 4096
_LIST_BLOCK = 4096  # pairs at a time


class _Tile(NamedTuple):
    """What a program multiplies at a time, and how.

    Attributes:
        pairs: of a token and the expert.
        rows: of the weight.
        row_bytes: of such a row, and of a token's input.
    """

    pairs: int
    rows: int
    row_bytes: int
    num_warps: int
    num_stages: int


# By the largest mean number of pairs an expert that takes the tile.
_TILES = {
    2: _Tile(16, 64, 256, 4, 3),
    8: _Tile(16, 128, 256, 4, 3),
    16: _Tile(32, 128, 128, 4, 4),
    32: _Tile(64, 128, 128, 4, 4),
    96: _Tile(64, 256, 128, 8, 3),
}
_LARGEST_TILE = _Tile(128, 256, 128, 8, 3)


@triton.jit(do_not_specialize_on_alignment=["weight", "expert"])
def _route(
    logits, weight, expert, stride_logits, num_experts,
    EACH: tl.constexpr, EACH_2: tl.constexpr, EXPERTS_2: tl.constexpr, NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Choose EACH experts of a token, one after the other."""
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
    tl.store(expert + t * EACH + a, chosen, mask=a < EACH)


def route(logits_TE: Tensor, weight_TA: Tensor, expert_TA: Tensor, normalize: bool) -> None:
    tokens, num_experts = logits_TE.shape
    each = weight_TA.shape[1]
    if tokens == 0:
        return
    _route[(tokens,)](
        logits_TE, weight_TA, expert_TA, logits_TE.stride(0), num_experts,
        EACH=each, EACH_2=triton.next_power_of_2(each),
        EXPERTS_2=triton.next_power_of_2(num_experts),
        NORMALIZE=normalize, num_warps=1, **pdl(logits_TE),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["expert"])
def _gate_up_rows(
    x, weight, expert, h, width, mlp_width, stride_x, stride_expert, stride_row,
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
    rows = weight + tl.load(expert + j).to(tl.int64) * stride_expert
    rows += (u // 2 + u % 2 * mlp_width)[:, None] * stride_row
    w = tl.load(rows + d, mask=inside & (d < width), other=0.0)
    total = products(w, rows, x + j // EACH * stride_x, inside, width, BLOCK)
    gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
    f = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h + j * mlp_width + f, value.to(h.dtype.element_ty), mask=f < mlp_width)


@triton.jit(do_not_specialize_on_alignment=["scale", "expert"])
def _down_rows(
    h, weight, scale, expert, y, mlp_width, width, stride_expert, stride_row,
    EACH: tl.constexpr, EACH_2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[t, d]: the weighted sum of row d of each of the token's experts.

    The ids of the experts, and the weights, need no wait here. The kernel before this one waited
    for them before it let this one start.
    """
    d = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    a = tl.arange(0, EACH_2)
    f = tl.arange(0, BLOCK)[None, :]
    inside = (a < EACH)[:, None]
    j = t * EACH + tl.minimum(a, EACH - 1)
    chosen = tl.load(expert + j, cache_modifier=".cg").to(tl.int64)
    rows = weight + chosen[:, None] * stride_expert + d * stride_row
    w = tl.load(rows + f, mask=inside & (f < mlp_width), other=0.0)
    wait_for_inputs(PDL)
    total = products(w, rows, h + j[:, None] * mlp_width, inside, mlp_width, BLOCK)
    result = tl.sum(total * tl.load(scale + j).to(tl.float32), axis=0)
    tl.store(y + t * width + d, result.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["num_pairs"])
def _list_pairs(expert, pairs, count, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """List the pairs of one expert."""
    e = tl.program_id(0).to(tl.int64)
    found = 0
    wait_for_inputs(PDL)
    for begin in range(0, num_pairs, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        is_match = tl.load(expert + j, mask=j < num_pairs, other=-1) == e
        place = found + tl.cumsum(is_match.to(tl.int32), axis=0) - 1
        tl.store(pairs + e * num_pairs + place, j, mask=is_match)
        found += tl.sum(is_match.to(tl.int32), axis=0)
    tl.store(count + e, found)


def list_pairs(expert_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """List the pairs of each expert in ascending order.

    Returns:
        pair_EJ: int32; only the first count_E[e] entries of row e are written.
        count_E: int32.
    """
    num_pairs = expert_TA.numel()
    device = expert_TA.device
    pair_EJ = torch.empty(num_experts, num_pairs, dtype=torch.int32, device=device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    _list_pairs[(num_experts,)](
        expert_TA, pair_EJ, count_E, num_pairs, BLOCK=_LIST_BLOCK, num_warps=8, **pdl(expert_TA)
    )
    return pair_EJ, count_E


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply(
    x, weight, pairs, count, y, inputs, outputs, num_pairs, stride_x, stride_expert, stride_row,
    EACH: tl.constexpr, IS_GATED: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[j] = x[j // EACH] @ weight[e].T for the pairs j of an expert, PAIRS at a time.

    If gated, y[j] is silu(gate) * up of that product.
    """
    block = tl.program_id(1)
    e = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, INPUTS)
    if IS_GATED:  # rows of gate and of up take turns, so that a thread has both
        row = tl.where(r < 2 * outputs, r // 2 + r % 2 * outputs, 0)
        o = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        row = tl.where(r < outputs, r, 0)
        o = r
    w_rows = weight + e * stride_expert + row[None, :] * stride_row + i[:, None]
    wait_for_inputs(PDL)
    end = tl.load(count + e)
    for first in range(block * PAIRS, end, tl.num_programs(1) * PAIRS):
        place = first + tl.arange(0, PAIRS)
        j = tl.load(pairs + e * num_pairs + place, mask=place < end, other=0).to(tl.int64)
        x_rows = x + (j // EACH)[:, None] * stride_x + i[None, :]
        acc = tl.zeros((PAIRS, ROWS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            inside = begin + i < inputs
            a = tl.load(x_rows + begin, mask=inside[None, :], other=0.0)
            b = tl.load(w_rows + begin, mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if IS_GATED:
            gate, up = tl.split(tl.reshape(acc, (PAIRS, ROWS // 2, 2)))
            value = gate * tl.sigmoid(gate) * up
        else:
            value = acc
        mask = (place < end)[:, None] & (o < outputs)[None, :]
        tl.store(y + j[:, None] * outputs + o[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def _sum_of_pairs(
    y, scale, total, width, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """total[t] = sum of scale[j] * y[j] over the pairs j of a token."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    wait_for_inputs(PDL)
    for a in tl.static_range(EACH):
        value = tl.load(y + (t * EACH + a) * width + d, mask=d < width, other=0.0)
        acc += value.to(tl.float32) * tl.load(scale + t * EACH + a).to(tl.float32)
    tl.store(total + t * width + d, acc.to(total.dtype.element_ty), mask=d < width)


def moe_by_expert(
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
    h_JF = x_TD.new_empty(expert_TA.numel(), down_EDF.shape[2])
    each = expert_TA.shape[1]
    pair_EJ, count_E = list_pairs(expert_TA, len(down_EDF))
    _multiply_all(x_TD, gate_up_EUD, pair_EJ, count_E, h_JF, each=each, is_gated=True)
    y_JD = x_TD.new_empty(expert_TA.numel(), width)
    _multiply_all(h_JF, down_EDF, pair_EJ, count_E, y_JD, each=1, is_gated=False)
    grid = (tokens, triton.cdiv(width, _BLOCK))
    _sum_of_pairs[grid](y_JD, weight_TA, y_TD, width, EACH=each, BLOCK=_BLOCK, **pdl(x_TD))


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
    each_2 = triton.next_power_of_2(each)
    _gate_up_rows[(triton.cdiv(2 * mlp_width, _ROWS), num_pairs)](
        x_TD, gate_up_EUD, expert_TA, h_JF, width, mlp_width,
        x_TD.stride(0), gate_up_EUD.stride(0), gate_up_EUD.stride(1),
        EACH=each, ROWS=_ROWS, BLOCK=_BLOCK, **pdl(x_TD),
    )  # fmt: skip
    _down_rows[(width, tokens)](
        h_JF, down_EDF, weight_TA, expert_TA, y_TD, mlp_width, width,
        down_EDF.stride(0), down_EDF.stride(1),
        EACH=each, EACH_2=each_2,
        BLOCK=min(triton.next_power_of_2(mlp_width), _DOWN_NUMBERS // each_2), **pdl(x_TD),
    )  # fmt: skip


def _multiply_all(
    x_TI: Tensor,
    weight_EOI: Tensor,
    pair_EJ: Tensor,
    count_E: Tensor,
    y_JO: Tensor,
    *,
    each: int,
    is_gated: bool,
) -> None:
    """Multiply each pair's row of x with its expert's weight.

    Args:
        x_TI: row j // each belongs to pair j; with each = 1 it has a row a pair.
        weight_EOI: if gated, U rows, of which the product has half as many columns.
    """
    num_experts, num_rows, inputs = weight_EOI.shape
    num_pairs = pair_EJ.shape[1]
    tile = _tile_for(num_pairs, num_experts)
    grid = (
        triton.cdiv(num_rows, tile.rows),
        triton.cdiv(num_pairs, num_experts * tile.pairs),
        num_experts,
    )
    _multiply[grid](
        x_TI, weight_EOI, pair_EJ, count_E, y_JO, inputs, y_JO.shape[1], num_pairs,
        x_TI.stride(0), weight_EOI.stride(0), weight_EOI.stride(1),
        EACH=each, IS_GATED=is_gated,
        PAIRS=tile.pairs, ROWS=tile.rows, INPUTS=tile.row_bytes // x_TI.itemsize,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(x_TI),
    )  # fmt: skip


def nums_of_tokens_by_tile(num_experts: int, each: int) -> list[int]:
    """The most tokens that take each tile, and a number that takes the largest one."""
    most = [pairs * num_experts // each for pairs in _TILES]
    return [*most, most[-1] + 1]


def _tile_for(num_pairs: int, num_experts: int) -> _Tile:
    for pairs_an_expert, tile in _TILES.items():
        if num_pairs <= pairs_an_expert * num_experts:
            return tile
    return _LARGEST_TILE
