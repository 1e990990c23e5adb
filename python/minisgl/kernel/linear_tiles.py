"""How a GPU divides the product of some tokens with a weight among its programs.

A product of 17 to some hundred tokens has few of the tiles that libraries multiply at a time, so
most multiprocessors would be idle. Smaller tiles, and parts of the inputs, let all of them copy a
part of what is to be read. Parts of a sum are then added up by whoever reads it.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

# Inputs that a program of `gpu/tiled_products.py` multiplies at a time.
INPUTS_AT_ONCE = 128

_TOKENS = (16, 32, 64)
_OUTPUTS = (32, 64, 128)
_OUTPUTS_OF_HALVES = (32, 64)
_PARTS = (1, 2, 3, 4, 6, 8)
_PART_BYTES = 4  # of a number: parts are in float32
_NUMBER_BYTES = 2  # of any other
# Writing a number, and reading it again in a norm, takes as long as copying so many of its size.
_COST_OF_RESULT = 4
# A program begins without anything to multiply, for as long as it takes to copy so many bytes.
_COST_OF_ROUND = 192 << 10
# Torch is as fast or faster beyond. On an H200, with the norm that follows, torch's time first, µs:
# 64 tokens, 17,408 inputs and 5,120 outputs 54.4 and 49.6, 5,120 inputs and gate and up of 17,408
# outputs 98 and 99; 256 tokens, 3,072 inputs and 1,024 outputs 9.7 and 8.1, 2,048 inputs and 2,048
# outputs 9.0 and 9.1; without parts, 128 and 192 tokens, 1,024 inputs and 4,096 outputs 7.3 and
# 6.2, and 7.9 and 8.0.
_MOST_TOKENS = 512
_LARGEST_WEIGHT = 120_000_000  # numbers
_HIGHEST_COST = 540 << 10
_HIGHEST_COST_OF_PARTS = 832 << 10


class LinearTile(NamedTuple):
    """What a program multiplies.

    Attributes:
        outputs: rows of the weight, or of each of its halves.
        parts: of the inputs; a program adds up one of them.
    """

    tokens: int
    outputs: int
    parts: int


@lru_cache(maxsize=4096)
def linear_tile(
    num_tokens: int,
    outputs: int,
    inputs: int,
    *,
    halves: int,
    may_divide: bool,
    num_processors: int,
) -> LinearTile | None:
    """The tile whose programs copy the least, or None where torch's product is as fast.

    Args:
        outputs: of the product, or of each half of a weight of gate and up.
        halves: 2 for gate and up, 1 for any other weight.
        may_divide: whether there may be parts.
        num_processors: multiprocessors of the GPU.
    """
    is_large = halves * outputs * inputs > _LARGEST_WEIGHT
    if not 0 < num_tokens <= _MOST_TOKENS or inputs % INPUTS_AT_ONCE or is_large:
        return None
    tokens = next((size for size in _TOKENS if num_tokens <= size), _TOKENS[-1])
    tiles_of_tokens = -(-num_tokens // tokens)
    costs: dict[LinearTile, float] = {}
    for size, parts in itertools.product(
        _OUTPUTS if halves == 1 else _OUTPUTS_OF_HALVES, _PARTS if may_divide else (1,)
    ):
        programs = -(-outputs // size) * tiles_of_tokens * parts
        if inputs % (parts * INPUTS_AT_ONCE) or (parts > 1 and programs > num_processors):
            continue
        copied = (tokens + halves * size) * (inputs // parts) * _NUMBER_BYTES
        written = tokens * size * (_NUMBER_BYTES if parts == 1 else _PART_BYTES)
        rounds = -(-programs // num_processors)
        cost = rounds * (_COST_OF_ROUND + copied + _COST_OF_RESULT * written)
        if parts > 1:
            added_up = parts * num_tokens * outputs * _PART_BYTES / num_processors
            cost += _COST_OF_RESULT * added_up
        costs[LinearTile(tokens, size, parts)] = cost
    tile = min(costs, key=lambda tile: costs[tile])
    highest = _HIGHEST_COST if tile.parts == 1 else _HIGHEST_COST_OF_PARTS
    is_torchs = num_tokens > _TOKENS[-1] and costs[tile] > highest
    return None if is_torchs else tile
