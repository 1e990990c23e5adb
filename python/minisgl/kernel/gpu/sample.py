"""The next tokens of a batch in two launches: the best of each part of the vocabulary, then the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import pdl, wait_for_inputs

_BLOCK = 256  # of one warp: the smaller, the more of them hold no token that can win
_PROGRAMS = 8192  # about: twice what a large GPU holds at a time


@triton.jit
def _mix(x):
    """lowbias32 on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _gumbel(bits):
    """Noise from 23 bits: the more they are as a number, the more noise; in (-2.9, 16.7)."""
    return -tl.log(-tl.log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))


@triton.jit(do_not_specialize=["blocks_of_part", "num_parts"])
def _best_of_part(
    logits, lowest, temperature, seed, position, best, token, stride_logits, vocab_size, blocks_of_part, num_parts,
    HAS_LOWEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_inputs(PDL)
    t = tl.load(temperature + b)
    low = tl.load(seed + 2 * b).to(tl.uint32, bitcast=True)
    high = tl.load(seed + 2 * b + 1).to(tl.uint32, bitcast=True)
    key = _mix(low ^ _mix(high ^ _mix(tl.load(position + b).to(tl.uint32, bitcast=True))))
    border = -float("inf")
    if HAS_LOWEST:
        border = tl.where(t > 0, tl.load(lowest + b), border)
    top, top_id = -float("inf"), 2147483647
    for block in range(part * blocks_of_part, (part + 1) * blocks_of_part):
        i = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(
            logits + b * stride_logits + i, mask=i < vocab_size, other=-float("inf")
        ).to(tl.float32)
        score = tl.where(score >= border, score, -float("inf"))
        most = tl.max(score, axis=0)
        may_win = most + t * 16.7 > top
        if may_win & (t > 0):  # noise costs more than a look at whether it matters
            bits = (_mix(_mix(i.to(tl.uint32) ^ key) ^ key) >> 9).to(tl.int32)
            may_win = most + t * (_gumbel(tl.max(bits, axis=0)) + 1e-4) > top
            if may_win:
                score += t * _gumbel(bits)
        if may_win:
            most = tl.max(score, axis=0)
            if most > top:
                top = most
                top_id = tl.min(tl.where(score == most, i, 2147483647), axis=0)
    tl.store(best + b * num_parts + part, top)
    tl.store(token + b * num_parts + part, top_id)


@triton.jit(do_not_specialize=["num_parts"])
def _best_of_all(
    best, token, output, num_parts, vocab_size, PARTS: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(0)
    i = tl.arange(0, PARTS)
    wait_for_inputs(PDL)
    score = tl.load(best + b * num_parts + i, mask=i < num_parts, other=-float("inf"))
    candidate = tl.load(token + b * num_parts + i, mask=i < num_parts, other=2147483647)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), candidate, 2147483647), axis=0)
    tl.store(output + b, tl.minimum(chosen, vocab_size - 1))  # NaN is no best: an id all the same


def choose_tokens(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
) -> Tensor:
    batch_size, vocab_size = logits_BV.shape
    num_blocks, parts_wanted = triton.cdiv(vocab_size, _BLOCK), triton.cdiv(_PROGRAMS, batch_size)
    blocks_of_part = triton.cdiv(num_blocks, parts_wanted)
    num_parts = triton.cdiv(num_blocks, blocks_of_part)
    best = torch.empty(batch_size, num_parts, dtype=torch.float32, device=logits_BV.device)
    token = torch.empty(batch_size, num_parts, dtype=torch.int32, device=logits_BV.device)
    output_B = torch.empty(batch_size, dtype=torch.int32, device=logits_BV.device)
    _best_of_part[(batch_size, num_parts)](
        logits_BV, logits_BV if lowest_B is None else lowest_B, temperature_B, seed_B2, position_B, best, token,
        logits_BV.stride(0), vocab_size, blocks_of_part, num_parts,
        HAS_LOWEST=lowest_B is not None, BLOCK=_BLOCK, num_warps=1, maxnreg=64, **pdl(logits_BV),
    )  # fmt: skip
    _best_of_all[(batch_size,)](
        best, token, output_B, num_parts, vocab_size,
        PARTS=triton.next_power_of_2(num_blocks), num_warps=1, **pdl(logits_BV),
    )  # fmt: skip
    return output_B
