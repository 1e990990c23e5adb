"""Mixture of experts without a word from the host: who goes where is found out on the device.

A few tokens are bound by reading the weights, and take them row by row like `one_token_linear`. More tokens are listed
by expert first; then a program multiplies a tile of an expert's weight with all that the expert's list holds, or with
its share of it, so grids depend on the number of tokens alone and the launches can be recorded in a graph.
"""

# Dimension key: T tokens, D model width, F mlp width, E experts, A experts a token, X = 2 F, P = T A pairs of both.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs
from minisgl.kernel.gpu.linear import products

_FEW = 4  # tokens that seldom share an expert
_ROWS, _BLOCK, _DOWN_NUMBERS = 4, 1024, 4096  # of a weight at a time, for a few tokens
_LIST_BLOCK = 4096
# Up to so many pairs an expert: pairs, rows of the weight and bytes of such a row at a time; warps, stages.
_TILES = {
    2: (16, 64, 256, 4, 3),
    8: (16, 128, 256, 4, 3),
    16: (32, 128, 128, 4, 4),
    32: (64, 128, 128, 4, 4),
    96: (64, 256, 128, 8, 3),
    None: (128, 256, 128, 8, 3),
}


@triton.jit
def _route(
    logits, weight, expert, stride_logits, num_experts,
    EACH: tl.constexpr, EACH_2: tl.constexpr, EXPERTS_2: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    a, e = tl.arange(0, EACH_2), tl.arange(0, EXPERTS_2)
    wait_for_inputs(PDL)
    left = tl.load(logits + t * stride_logits + e, mask=e < num_experts, other=-float("inf")).to(
        tl.float32
    )
    top = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - top), axis=0)
    chosen, value = tl.zeros((EACH_2,), tl.int32), tl.zeros((EACH_2,), tl.float32)
    for n in range(EACH):
        highest = tl.max(left, axis=0)
        best = tl.min(
            tl.where(left == highest, e, num_experts - 1), axis=0
        )  # NaN is no best: an expert all the same
        chosen = tl.where(a == n, best, chosen)
        value = tl.where(a == n, tl.exp(highest - top), value)
        left = tl.where(e == best, -float("inf"), left)
    if NORMALIZE:
        total = tl.sum(value, axis=0)
    tl.store(weight + t * EACH + a, (value / total).to(weight.dtype.element_ty), mask=a < EACH)
    tl.store(expert + t * EACH + a, chosen, mask=a < EACH)


def route(logits_TE: Tensor, weight_TA: Tensor, expert_TA: Tensor, normalize: bool) -> None:
    (tokens, num_experts), each = logits_TE.shape, weight_TA.shape[1]
    if tokens:
        _route[(tokens,)](
            logits_TE, weight_TA, expert_TA, logits_TE.stride(0), num_experts,
            EACH=each, EACH_2=triton.next_power_of_2(each), EXPERTS_2=triton.next_power_of_2(num_experts),
            NORMALIZE=normalize, num_warps=1, **pdl(logits_TE),
        )  # fmt: skip


@triton.jit
def _gate_up_rows(
    x, weight, expert, h, width, mlp_width, stride_x, stride_expert, stride_row,
    EACH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h[pair] = silu(gate) * up for some of the columns; rows of the gate and of the up projection take turns."""
    pair, i = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (r < 2 * mlp_width)[:, None]
    wait_for_inputs(PDL)
    rows = weight + tl.load(expert + pair).to(tl.int64) * stride_expert
    rows += (r // 2 + r % 2 * mlp_width)[:, None] * stride_row
    w = tl.load(rows + i, mask=inside & (i < width), other=0.0)
    total = products(w, rows, x + pair // EACH * stride_x, inside, width, BLOCK)
    gate, up = tl.split(tl.reshape(total, (ROWS // 2, 2)))
    f = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h + pair * mlp_width + f, value.to(h.dtype.element_ty), mask=f < mlp_width)


@triton.jit
def _down_rows(
    h, weight, scale, expert, y, mlp_width, width, stride_expert, stride_row,
    EACH: tl.constexpr, EACH_2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A number of y: a row of each of the token's experts. The ids of these are older than the launch before this one,
    which waited for them before it let this one start; so they, and the weights, need no wait here."""
    d, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a, i = tl.arange(0, EACH_2), tl.arange(0, BLOCK)[None, :]
    inside = (a < EACH)[:, None]
    pair = t * EACH + tl.minimum(a, EACH - 1)
    chosen = tl.load(expert + pair, cache_modifier=".cg").to(tl.int64)
    rows = weight + chosen[:, None] * stride_expert + d * stride_row
    w = tl.load(rows + i, mask=inside & (i < mlp_width), other=0.0)
    wait_for_inputs(PDL)
    total = products(w, rows, h + pair[:, None] * mlp_width, inside, mlp_width, BLOCK)
    result = tl.sum(total * tl.load(scale + pair).to(tl.float32), axis=0)
    tl.store(y + t * width + d, result.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["num_pairs"])
def _list_pairs(expert, pairs, count, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    found = 0
    wait_for_inputs(PDL)
    for begin in range(0, num_pairs, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        is_mine = tl.load(expert + i, mask=i < num_pairs, other=-1) == e
        place = found + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(pairs + e * num_pairs + place, i, mask=is_mine)
        found += tl.sum(is_mine.to(tl.int32), axis=0)
    tl.store(count + e, found)


def list_pairs(expert_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs of each expert in order, int32 [E, P], of which the first count_E[e] are meant; and count_E."""
    num_pairs, device = expert_TA.numel(), expert_TA.device
    pair_EP = torch.empty(num_experts, num_pairs, dtype=torch.int32, device=device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    _list_pairs[(num_experts,)](
        expert_TA, pair_EP, count_E, num_pairs, BLOCK=_LIST_BLOCK, num_warps=8, **pdl(expert_TA)
    )
    return pair_EP, count_E


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply(
    x, weight, pairs, count, y, inputs, outputs, num_pairs, stride_x, stride_expert, stride_row,
    EACH: tl.constexpr, IS_GATED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[pair] = x[pair // EACH] @ weight[e].T for an expert's pairs, M at a time; if gated, silu(gate) * up of it."""
    split, e = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, k = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    if IS_GATED:  # rows of the gate and of the up projection take turns, so that a thread has both
        row, f = n // 2 + n % 2 * outputs, tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
        row = tl.where(n < 2 * outputs, row, 0)
    else:
        row, f = tl.where(n < outputs, n, 0), n
    w_rows = weight + e * stride_expert + row[None, :] * stride_row + k[:, None]
    wait_for_inputs(PDL)
    end = tl.load(count + e)
    for first in range(split * M, end, tl.num_programs(1) * M):
        m = first + tl.arange(0, M)
        pair = tl.load(pairs + e * num_pairs + m, mask=m < end, other=0).to(tl.int64)
        x_rows = x + (pair // EACH)[:, None] * stride_x + k[None, :]
        acc = tl.zeros((M, N), tl.float32)
        for begin in range(0, inputs, K):
            inside = begin + k < inputs
            a = tl.load(x_rows + begin, mask=inside[None, :], other=0.0)
            b = tl.load(w_rows + begin, mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if IS_GATED:
            gate, up = tl.split(tl.reshape(acc, (M, N // 2, 2)))
            value = gate * tl.sigmoid(gate) * up
        else:
            value = acc
        mask = (m < end)[:, None] & (f < outputs)[None, :]
        tl.store(y + pair[:, None] * outputs + f[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _add_up(y, scale, total, width, EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    wait_for_inputs(PDL)
    for a in tl.static_range(EACH):
        value = tl.load(y + (t * EACH + a) * width + i, mask=i < width, other=0.0)
        acc += value.to(tl.float32) * tl.load(scale + t * EACH + a).to(tl.float32)
    tl.store(total + t * width + i, acc.to(total.dtype.element_ty), mask=i < width)


def moe(
    x_TD: Tensor,
    gate_up_EXD: Tensor,
    down_EDF: Tensor,
    weight_TA: Tensor,
    expert_TA: Tensor,
    y_TD: Tensor,
) -> None:
    h_PF = x_TD.new_empty(expert_TA.numel(), down_EDF.shape[2])
    if len(x_TD) <= _FEW:
        _few_tokens(x_TD, gate_up_EXD, down_EDF, weight_TA, expert_TA, h_PF, y_TD)
        return
    (tokens, width), each = x_TD.shape, expert_TA.shape[1]
    lists = list_pairs(expert_TA, len(down_EDF))
    _multiply_all(x_TD, gate_up_EXD, *lists, h_PF, each=each, is_gated=True)
    y_PD = x_TD.new_empty(expert_TA.numel(), width)
    _multiply_all(h_PF, down_EDF, *lists, y_PD, each=1, is_gated=False)
    grid = (tokens, triton.cdiv(width, _BLOCK))
    _add_up[grid](y_PD, weight_TA, y_TD, width, EACH=each, BLOCK=_BLOCK, **pdl(x_TD))


def _few_tokens(
    x_TD: Tensor, gate_up_EXD: Tensor, down_EDF: Tensor, weight_TA: Tensor, expert_TA: Tensor, h_PF: Tensor,
    y_TD: Tensor,
) -> None:  # fmt: skip
    (tokens, width), (num_pairs, mlp_width) = x_TD.shape, h_PF.shape
    if tokens == 0:
        return
    each, launch = expert_TA.shape[1], pdl(x_TD)
    each_2 = triton.next_power_of_2(each)
    _gate_up_rows[(triton.cdiv(2 * mlp_width, _ROWS), num_pairs)](
        x_TD, gate_up_EXD, expert_TA, h_PF, width, mlp_width, x_TD.stride(0), *gate_up_EXD.stride()[:2],
        EACH=each, ROWS=_ROWS, BLOCK=_BLOCK, **launch,
    )  # fmt: skip
    _down_rows[(width, tokens)](
        h_PF, down_EDF, weight_TA, expert_TA, y_TD, mlp_width, width, *down_EDF.stride()[:2],
        EACH=each, EACH_2=each_2, BLOCK=min(triton.next_power_of_2(mlp_width), _DOWN_NUMBERS // each_2), **launch,
    )  # fmt: skip


def _multiply_all(
    x: Tensor,
    weight: Tensor,
    pair_EP: Tensor,
    count_E: Tensor,
    y: Tensor,
    *,
    each: int,
    is_gated: bool,
) -> None:
    num_experts, num_rows, inputs = weight.shape
    num_pairs = pair_EP.shape[1]
    few = next(few for few in _TILES if few is None or num_pairs <= few * num_experts)
    m, n, row_bytes, warps, stages = _TILES[few]
    _multiply[(triton.cdiv(num_rows, n), triton.cdiv(num_pairs, num_experts * m), num_experts)](
        x, weight, pair_EP, count_E, y, inputs, y.shape[1], num_pairs, x.stride(0), *weight.stride()[:2],
        EACH=each, IS_GATED=is_gated, M=m, N=n, K=row_bytes // x.itemsize, num_warps=warps, num_stages=stages, **pdl(x),
    )  # fmt: skip
