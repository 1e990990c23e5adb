"""Pairs of a token and an expert it chose, sorted by experts.

Few are sorted by one launch, by a program for each expert. Many are counted in chunks, then each
expert gets its blocks, and each of its pairs a place.
"""

# Dimensions: A experts that a token chooses, T tokens of a step, X a selection out of another
# dimension, Z entries of a flat list.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.expert_tiles import MOST_PAIRS_AT_ONCE
from minisgl.kernel.gpu.launch import RememberedKernel, next_power_of_2, pdl, wait_for_inputs

_CHUNK_PAIRS = 2048  # that are counted at a time, if there are more than MOST_PAIRS_AT_ONCE
_LEAST_BINS = 128  # the variant for this many experts counts fewer, too
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
