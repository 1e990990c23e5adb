"""Samples in two launches: the best token of each split of the vocabulary, then the best of all."""

# Dimensions: B requests of a step, V vocabulary.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

_BLOCK = 256  # logits of one warp: the fewer, the more blocks hold no token that can win
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
    """Noise in (-2.9, 16.7) from 23 bits; it grows with the number that the bits make."""
    return -tl.log(-tl.log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))


@RememberedKernel
@triton.jit(
    do_not_specialize=["blocks_of_split", "num_splits", "first_token"],
    do_not_specialize_on_alignment=["lowest", "temperature", "seed", "position", "best", "token"],
)
def _best_of_split(
    logits, lowest, temperature, seed, position, best, token,
    stride_logits, num_tokens, blocks_of_split, num_splits, first_token,
    HAS_LOWEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    heat = tl.load(temperature + b)
    low = tl.load(seed + 2 * b).to(tl.uint32, bitcast=True)
    high = tl.load(seed + 2 * b + 1).to(tl.uint32, bitcast=True)
    key = _mix(low ^ _mix(high ^ _mix(tl.load(position + b).to(tl.uint32, bitcast=True))))
    border = -float("inf")
    if HAS_LOWEST:
        border = tl.where(heat > 0, tl.load(lowest + b), border)
    row = logits + b * stride_logits
    top = -float("inf")
    top_id = 2147483647
    for block in range(split * blocks_of_split, (split + 1) * blocks_of_split):
        column = block * BLOCK + tl.arange(0, BLOCK)
        v = first_token + column
        score = tl.load(row + column, mask=column < num_tokens, other=-float("inf"))
        score = score.to(tl.float32)
        score = tl.where(score >= border, score, -float("inf"))
        most = tl.max(score, axis=0)
        # Noise costs more than to find out whether it can matter, so bounds of it come first.
        may_win = most + heat * 16.7 > top
        if may_win & (heat > 0):
            bits = (_mix(_mix(v.to(tl.uint32) ^ key) ^ key) >> 9).to(tl.int32)
            may_win = most + heat * (_gumbel(tl.max(bits, axis=0)) + 1e-4) > top
            if may_win:
                score += heat * _gumbel(bits)
        if may_win:
            most = tl.max(score, axis=0)
            if most > top:
                top = most
                top_id = tl.min(tl.where(score == most, v, 2147483647), axis=0)
    tl.store(best + b * num_splits + split, top)
    tl.store(token + b * num_splits + split, top_id)


@RememberedKernel
@triton.jit(
    do_not_specialize=["num_splits", "first_token"],
    do_not_specialize_on_alignment=["best", "token", "output"],
)
def _best_of_all(
    best, token, output, num_splits, first_token,
    SPLITS_2: tl.constexpr, KEEPS_SCORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    split = tl.arange(0, SPLITS_2)
    mask = split < num_splits
    wait_for_inputs(PDL)
    score = tl.load(best + b * num_splits + split, mask=mask, other=-float("inf"))
    candidate = tl.load(token + b * num_splits + split, mask=mask, other=2147483647)
    top = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == top, candidate, 2147483647), axis=0)
    # Where all logits are NaN or banned no token is the best; the result is a valid id even then.
    chosen = tl.where(chosen == 2147483647, first_token, chosen)
    if KEEPS_SCORE:
        bits = tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True)  # both zeros are equal
        ascending = tl.where(bits < 0, bits ^ 2147483647, bits)
        chosen = ((~ascending).to(tl.int64) << 32) | chosen.to(tl.int64)
    tl.store(output + b, chosen)


def choose_tokens(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
) -> Tensor:
    token_B = torch.empty(len(logits_BV), dtype=torch.int32, device=logits_BV.device)
    _choose(logits_BV, lowest_B, temperature_B, seed_B2, position_B, 0, token_B)
    return token_B


def choose_scored_tokens(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
    first_token: int,
) -> Tensor:
    scored_B = torch.empty(len(logits_BV), dtype=torch.int64, device=logits_BV.device)
    _choose(logits_BV, lowest_B, temperature_B, seed_B2, position_B, first_token, scored_B)
    return scored_B


def _choose(
    logits_BV: Tensor,
    lowest_B: Tensor | None,
    temperature_B: Tensor,
    seed_B2: Tensor,
    position_B: Tensor,
    first_token: int,
    output_B: Tensor,
) -> None:
    """Write tokens to an output of int32, tokens with their scores to one of int64."""
    batch_size, num_tokens = logits_BV.shape
    device = logits_BV.device

    # As many splits as fill the device, each a whole number of blocks.
    num_blocks = -(-num_tokens // _BLOCK)
    blocks_of_split = -(-num_blocks // -(-_PROGRAMS // batch_size))
    num_splits = -(-num_blocks // blocks_of_split)

    best = torch.empty(batch_size, num_splits, dtype=torch.float32, device=device)
    token = torch.empty(batch_size, num_splits, dtype=torch.int32, device=device)
    _best_of_split[(batch_size, num_splits)](
        logits_BV, logits_BV if lowest_B is None else lowest_B, temperature_B, seed_B2, position_B,
        best, token, logits_BV.stride(0), num_tokens, blocks_of_split, num_splits, first_token,
        HAS_LOWEST=lowest_B is not None, BLOCK=_BLOCK, num_warps=1, maxnreg=64, **pdl(logits_BV),
    )  # fmt: skip
    _best_of_all[(batch_size,)](
        best, token, output_B, num_splits, first_token, SPLITS_2=next_power_of_2(num_blocks),
        KEEPS_SCORE=output_B.dtype == torch.int64, num_warps=1, **pdl(logits_BV),
    )  # fmt: skip
