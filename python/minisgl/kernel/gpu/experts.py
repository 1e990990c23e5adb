"""Mixture of experts whose routing stays on the device: the host never reads it.

`moe_by_token` reads an expert's weight for each token that chose it, row by row as
`one_token_linear` does. `moe_by_expert` sorts the pairs of a token and an expert by experts, in
blocks of one expert each (`expert_pairs.py`), and multiplies these (`expert_products.py`). How many
blocks there are is known on the device alone, so the launches can be captured in a CUDA graph.
`moe/fused.py` chooses between the two, and `moe/tiles.py` the sizes of tiles.

A pair whose expert is on another rank has a number outside [0, E). It has a place in the grids, but
its programs end at once, and it is in no block.
"""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# J pairs of a token and an expert it chose, T tokens of a step, U both halves of a gated mlp: 2 F,
# Z entries of a flat list.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.expert_tiles import ExpertTiles
from minisgl.kernel.gpu.expert_pairs import sort_pairs
from minisgl.kernel.gpu.expert_products import multiply_blocks
from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs
from minisgl.kernel.gpu.linear import products

# By token, at a time: rows of gate and up, numbers of such a row, numbers of rows of down.
_ROWS = 4
_BLOCK = 1024
_DOWN_NUMBERS = 4096


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
