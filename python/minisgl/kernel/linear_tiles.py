"""How a GPU divides the product of some tokens with a weight among its programs.

A product of up to some hundred tokens has few of the tiles that libraries multiply at a time, so
most multiprocessors would be idle. Smaller tiles, and parts of the inputs, let all of them copy a
share of what is to be read. Parts of a sum are then added up by whoever reads it.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

_TOKENS = (16, 64)  # more than 16 have the matrix instructions of Hopper, which take 64
_OUTPUTS = (32, 64, 128)
_OUTPUTS_OF_HALVES = (32, 64)
_PARTS = (1, 2, 3, 4, 6, 8)
_PART_BYTES = 4  # of a number: parts are in float32
_NUMBER_BYTES = 2  # of any other
# Inputs that a program multiplies at a time, alone on its multiprocessor or beside another one.
_INPUTS = {1: 128, 2: 64}
_FEWEST_STAGES = 2
_STAGES = 4
_STAGES_OF_LONG_SUMS = 5
_LONG_SUM = 1024  # inputs
_OTHER_SHARED_BYTES = 8 << 10  # besides the stages

# Writing a number, and reading it again in a norm, takes as long as copying so many of its size.
_COST_OF_RESULT = 4
# A program begins without anything to multiply, for as long as it takes to copy so many bytes.
_COST_OF_PROGRAM = 192 << 10
# Of more than 64 tokens torch is as fast beyond. On an H200, with the norm that follows or comes
# before, torch's time first, µs: 256 tokens, 3,072 inputs and 1,024 outputs 9.9 and 8.8, 2,048
# inputs and 2,048 outputs 9.0 and 9.1; without parts, 128 and 192 tokens, 1,024 inputs and 4,096
# outputs 7.5 and 6.6, and 7.9 and 8.0.
_MOST_TOKENS = 512
_HIGHEST_COST = 540 << 10
_HIGHEST_COST_OF_PARTS = 832 << 10


class LinearTile(NamedTuple):
    """What a program multiplies, and how.

    Attributes:
        outputs: rows of the weight, or of each of its halves.
        parts: of the inputs; a program adds up one of them.
        inputs: at a time.
        stages: of such inputs, whose copies are on their way together.
    """

    tokens: int
    outputs: int
    parts: int
    inputs: int
    stages: int


def tiled_sizes() -> list[int]:
    """Numbers of tokens: a product has all its tiles at some of them."""
    return [*_TOKENS, *range(2 * _TOKENS[-1], _MOST_TOKENS + 1, _TOKENS[-1])]


@lru_cache(maxsize=4096)
def linear_tile(
    num_tokens: int,
    outputs: int,
    inputs: int,
    *,
    halves: int,
    may_divide: bool,
    num_processors: int,
    shared_bytes: int,
) -> LinearTile | None:
    """The tile whose programs copy the least, or None where torch's product is as fast.

    Args:
        outputs: of the product, or of each half of a weight of gate and up.
        halves: 2 for gate and up, 1 for any other weight.
        may_divide: whether there may be parts.
        num_processors: multiprocessors of the GPU.
        shared_bytes: of the shared memory that a program may have.
    """
    if not 0 < num_tokens <= _MOST_TOKENS:
        return None
    costs: dict[LinearTile, float] = {}
    tokens = _TOKENS[0] if num_tokens <= _TOKENS[0] else _TOKENS[1]
    tiles_of_tokens = -(-num_tokens // tokens)
    for size, parts in itertools.product(
        _OUTPUTS if halves == 1 else _OUTPUTS_OF_HALVES, _PARTS if may_divide else (1,)
    ):
        programs = -(-outputs // size) * tiles_of_tokens * parts
        programs_each = -(-programs // num_processors)
        if programs_each not in _INPUTS or (parts > 1 and programs_each > 1):
            continue  # they would not all run at once
        if 2 * programs < num_processors:
            continue  # most of the device would be idle
        part_inputs, rest = divmod(inputs, parts)
        inputs_at_once = _INPUTS[programs_each]
        rows = tokens + halves * size
        room = shared_bytes // programs_each - _OTHER_SHARED_BYTES
        stages = min(
            _STAGES_OF_LONG_SUMS if part_inputs > _LONG_SUM and halves == 1 else _STAGES,
            room // (rows * inputs_at_once * _NUMBER_BYTES),
        )
        if rest or part_inputs % inputs_at_once or stages < _FEWEST_STAGES:
            continue
        copied = rows * part_inputs * _NUMBER_BYTES
        written = tokens * size * (_NUMBER_BYTES if parts == 1 else _PART_BYTES)
        cost = programs_each * (_COST_OF_PROGRAM + copied + _COST_OF_RESULT * written)
        if parts > 1:
            num_read = parts * tiles_of_tokens * tokens * outputs
            cost += _COST_OF_RESULT * num_read * _PART_BYTES / num_processors
        costs[LinearTile(tokens, size, parts, inputs_at_once, stages)] = cost
    tile = min(costs, key=lambda tile: costs[tile], default=None)
    if tile is None or num_tokens <= _TOKENS[-1]:
        return tile
    highest_cost = _HIGHEST_COST if tile.parts == 1 else _HIGHEST_COST_OF_PARTS
    return tile if costs[tile] <= highest_cost else None
