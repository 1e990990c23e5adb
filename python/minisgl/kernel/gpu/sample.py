"""Samples in two launches: the best segment of each split of the vocabulary, then the best token.

The first reads the logits once, the second those of one segment per request; see kernel/sample.py.
"""

# Dimensions: B requests of a step, V vocabulary.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs
from minisgl.kernel.segments import SEGMENT_SIZE

# Segments that a warp weighs at a time, half its lanes one each. With more of them the lanes
# exchange fewer numbers, but fewer warps are on a multiprocessor: of 256 requests, eight at a time
# took 57 to 60 µs on an H200, four 47, two and one 45.
_SEGMENTS = 2
_RUN = 128  # tokens that these lanes read at a time: of bfloat16, 16 bytes each
_PROGRAMS = 8192  # about: a warp each, more than a large GPU holds at a time


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
def _key(seed, position, b):
    low = tl.load(seed + 2 * b).to(tl.uint32, bitcast=True)
    high = tl.load(seed + 2 * b + 1).to(tl.uint32, bitcast=True)
    return _mix(low ^ _mix(high ^ _mix(tl.load(position + b).to(tl.uint32, bitcast=True))))


@triton.jit
def _gumbel(key, number):
    """Noise in (-2.9, 16.7) from 23 bits of a hash of int32 numbers."""
    bits = (_mix(_mix(number.to(tl.uint32, bitcast=True) ^ key) ^ key) >> 9).to(tl.int32)
    return -tl.log(-tl.log((bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07))


@triton.jit
def _border(lowest, b, heat, HAS_LOWEST: tl.constexpr):
    """The smallest logit that may be chosen: a NaN is not, and minus infinity is never the best."""
    border = -float("inf")
    if HAS_LOWEST:
        border = tl.where(heat > 0, tl.load(lowest + b), border)
    return border


@RememberedKernel
@triton.jit(
    do_not_specialize=["tiles_of_split", "num_splits", "first_token"],
    do_not_specialize_on_alignment=["lowest", "temperature", "seed", "position", "best", "segment"],
)
def _best_of_split(
    logits, lowest, temperature, seed, position, best, segment,
    stride_logits, num_tokens, tiles_of_split, num_splits, first_token,
    HAS_LOWEST: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, RUN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    heat = tl.load(temperature + b)
    per_heat = 1.4426950408889634 / tl.maximum(heat, 1e-30)  # for a power of two
    key = _key(seed, position, b)
    border = _border(lowest, b, heat, HAS_LOWEST)
    row = logits + b * stride_logits
    run = RUN * tl.arange(0, SEGMENT // RUN)[:, None, None]
    token = run + tl.arange(0, RUN)[None, None, :]  # of the segment
    tops = tl.full([SEGMENTS], -float("inf"), tl.float32)
    top_ids = tl.full([SEGMENTS], 2147483647, tl.int32)
    for tile in range(split * tiles_of_split, (split + 1) * tiles_of_split):
        number = tile * SEGMENTS + tl.arange(0, SEGMENTS)
        column = number[None, :, None] * SEGMENT + token
        logit = tl.load(row + column, mask=column < num_tokens, other=-float("inf"))
        logit = logit.to(tl.float32)
        logit = tl.where(logit >= border, logit, -float("inf"))
        most = tl.max(tl.max(logit, axis=0), axis=1)
        score = most
        if heat > 0:
            finite = tl.clamp(most, -3e38, 3e38)[None, :, None]
            weight = tl.exp2((logit - finite) * per_heat)
            total = tl.clamp(tl.sum(tl.sum(weight, axis=0), axis=1), 1.0, SEGMENT)
            noise = tl.log(total) + _gumbel(key, -1 - first_token // SEGMENT - number)
            score = most + heat * noise  # an infinite maximum stays what it is
        is_better = score > tops
        tops = tl.where(is_better, score, tops)
        top_ids = tl.where(is_better, number, top_ids)
    top = tl.max(tops, axis=0)
    tl.store(best + b * num_splits + split, top)
    top_id = tl.min(tl.where(tops == top, top_ids, 2147483647), axis=0)
    tl.store(segment + b * num_splits + split, top_id)


@RememberedKernel
@triton.jit(
    do_not_specialize=["num_splits", "first_token"],
    do_not_specialize_on_alignment=[
        "lowest", "temperature", "seed", "position", "best", "segment", "output"
    ],
)  # fmt: skip
def _best_of_all(
    logits, lowest, temperature, seed, position, best, segment, output,
    stride_logits, num_tokens, num_splits, first_token,
    HAS_LOWEST: tl.constexpr, SEGMENT: tl.constexpr, SPLITS_2: tl.constexpr,
    KEEPS_SCORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_2)
    mask = split < num_splits
    wait_for_inputs(PDL)
    score = tl.load(best + b * num_splits + split, mask=mask, other=-float("inf"))
    candidate = tl.load(segment + b * num_splits + split, mask=mask, other=2147483647)
    top = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == top, candidate, 2147483647), axis=0)
    # Where all logits are NaN or banned no segment is the best, and the result is no token.
    chosen = tl.where(chosen == 2147483647, 0, chosen)

    heat = tl.load(temperature + b)
    border = _border(lowest, b, heat, HAS_LOWEST)
    column = chosen * SEGMENT + tl.arange(0, SEGMENT)
    logit = tl.load(
        logits + b * stride_logits + column, mask=column < num_tokens, other=-float("inf")
    ).to(tl.float32)
    token = first_token + column
    noisy = tl.where(logit >= border, logit, -float("inf"))
    noisy += heat * _gumbel(_key(seed, position, b), token)
    best_token = tl.min(tl.where(noisy == tl.max(noisy, axis=0), token, 2147483647), axis=0)
    best_token = tl.where(top == -float("inf"), -1, best_token)
    if KEEPS_SCORE:
        bits = tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True)  # both zeros are equal
        ascending = tl.where(bits < 0, bits ^ 2147483647, bits)
        low_bits = best_token.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(output + b, ((~ascending).to(tl.int64) << 32) | low_bits)
    else:
        tl.store(output + b, best_token)


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

    # As many splits as fill the device, each a whole number of tiles.
    num_tiles = -(-num_tokens // (_SEGMENTS * SEGMENT_SIZE))
    tiles_of_split = -(-num_tiles // -(-_PROGRAMS // batch_size))
    num_splits = -(-num_tiles // tiles_of_split)

    best = torch.empty(batch_size, num_splits, dtype=torch.float32, device=device)
    segment = torch.empty(batch_size, num_splits, dtype=torch.int32, device=device)
    lowest = logits_BV if lowest_B is None else lowest_B
    inputs = (logits_BV, lowest, temperature_B, seed_B2, position_B, best, segment)
    stride = logits_BV.stride(0)
    options = {"HAS_LOWEST": lowest_B is not None, "SEGMENT": SEGMENT_SIZE, "num_warps": 1}
    _best_of_split[(batch_size, num_splits)](
        *inputs, stride, num_tokens, tiles_of_split, num_splits, first_token,
        SEGMENTS=_SEGMENTS, RUN=_RUN, **options, **pdl(logits_BV),
    )  # fmt: skip
    _best_of_all[(batch_size,)](
        *inputs, output_B, stride, num_tokens, num_splits, first_token,
        SPLITS_2=next_power_of_2(num_tiles), KEEPS_SCORE=output_B.dtype == torch.int64,
        **options, **pdl(logits_BV),
    )  # fmt: skip
