"""How a GPU divides the product of some tokens with a weight among its programs.

A product of up to some hundred tokens has few of the tiles that libraries multiply at a time, so
most multiprocessors would be idle. Smaller tiles, and parts of the inputs, let all of them copy a
share of what is to be read. The reader of such a sum then adds up its parts.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

MOST_TILED_TOKENS = 256  # more were not measured
_TOKENS = (16, 64)  # more than 16 have the matrix instructions of Hopper, which take 64
_OUTPUTS = (32, 64, 128)
_OUTPUTS_OF_HALVES = (32, 64)
_PARTS = (1, 2, 3, 4, 6, 8)
_PART_BYTES = 4  # of a number: parts are in float32
_NUMBER_BYTES = 2  # of any other
# 65 to 128 tokens may also have one tile of this shape, where such tiles fill the device. On an
# H200, torch's time first, µs, 96 and 128 tokens: 4,096 outputs and 4,096 inputs 19.5 and 15.7,
# 17.4 and 16.0; 14,336 inputs 41.5 and 38.5, 41.1 and 40.3. But 80 programs for 2,560 outputs and
# 4,096 inputs: 13.2 and 13.6, 12.8 and 14.2.
_LONG_TOKENS = 128
_OUTPUTS_OF_LONG = 64
_SHARE_OF_LONG = 0.9  # of the multiprocessors
_COST_OF_LONG = 0.92  # of what the rest of the rule makes of it

# Inputs that a program multiplies at a time, alone on its multiprocessor or beside another one.
_INPUTS = {1: 128, 2: 64}
_FEWEST_STAGES = 2
_STAGES = 4
_STAGES_OF_LONG_SUMS = 5
_INPUTS_OF_LONG = 64
_STAGES_OF_LONG = 8
_LONG_SUM = 1024  # inputs
_OTHER_SHARED_BYTES = 8 << 10  # besides the stages

# Writing a number, and reading it again in a norm, takes as long as copying so many of its size.
_COST_OF_RESULT = 4
# A program begins without anything to multiply, for as long as it takes to copy so many bytes.
_COST_OF_PROGRAM = 192 << 10
# Above these costs torch is as fast, for more than 64 tokens. On an H200, with the norm that
# follows or comes before, torch's time first, µs: 256 tokens, 3,072 inputs and 1,024 outputs 9.9
# and 8.8, 2,048 inputs and 2,048 outputs 9.0 and 9.1; without parts, 128 and 192 tokens, 1,024
# inputs and 4,096 outputs 7.5 and 6.6, and 7.9 and 8.0.
_HIGHEST_COST = 540 << 10
_HIGHEST_COST_OF_PARTS = 832 << 10


class LinearTile(NamedTuple):
    """The part of a matrix product that one GPU program computes.

    Attributes:
        outputs: rows of the weight, or of each of its halves.
        parts: of the inputs; a program adds up one of them.
        inputs: at a time.
        stages: of such inputs, whose copies are in flight together.
    """

    tokens: int
    outputs: int
    parts: int
    inputs: int
    stages: int


def tiled_sizes() -> list[int]:
    """Numbers of tokens such that each tile of a product is used at one of them."""
    return [*_TOKENS, *range(2 * _TOKENS[-1], MOST_TILED_TOKENS + 1, _TOKENS[-1])]


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
        num_tokens: up to `MOST_TILED_TOKENS`.
        outputs: of the product, or of each half of a weight of gate and up.
        halves: 2 for gate and up, 1 for any other weight.
        may_divide: whether there may be parts.
        num_processors: multiprocessors of the GPU.
        shared_bytes: of the shared memory that a program may have.
    """
    product = _Product(num_tokens, outputs, inputs, halves, num_processors, shared_bytes)
    parts = _PARTS if may_divide else (1,)
    tiles = [product.tile(*shape) for shape in itertools.product(product.shapes, parts)]
    costs = {tile: product.cost(tile) for tile in tiles if tile is not None}
    best = min(costs, key=lambda tile: costs[tile], default=None)
    if best is None or num_tokens <= max(best.tokens, _TOKENS[-1]):
        return best
    highest_cost = _HIGHEST_COST if best.parts == 1 else _HIGHEST_COST_OF_PARTS
    return best if costs[best] <= highest_cost else None


class _Product(NamedTuple):
    """A product on a GPU, as `linear_tile` has it."""

    num_tokens: int
    outputs: int
    inputs: int
    halves: int
    num_processors: int
    shared_bytes: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Tokens and outputs that a tile may have."""
        tokens = _TOKENS[0] if self.num_tokens <= _TOKENS[0] else _TOKENS[1]
        outputs = _OUTPUTS if self.halves == 1 else _OUTPUTS_OF_HALVES
        shapes = [(tokens, size) for size in outputs]
        if self.halves == 1 and _TOKENS[1] < self.num_tokens <= _LONG_TOKENS:
            shapes.append((_LONG_TOKENS, _OUTPUTS_OF_LONG))
        return shapes

    def tile(self, shape: tuple[int, int], parts: int) -> LinearTile | None:
        """The tile with so many parts, if the device can have it and is used well."""
        tokens, size = shape
        is_long = tokens == _LONG_TOKENS
        if tokens == _TOKENS[0] and parts == self.halves == 1:
            return None  # `csrc/linear.cu` is faster
        programs = self._programs(tokens, size, parts)
        programs_each = -(-programs // self.num_processors)
        if programs_each > (1 if parts > 1 or is_long else 2):
            return None  # they would not all run at once
        if programs < (_SHARE_OF_LONG if is_long else 0.5) * self.num_processors:
            return None  # too much of the device would be idle

        inputs_at_once = _INPUTS_OF_LONG if is_long else _INPUTS[programs_each]
        part_inputs, rest = divmod(self.inputs, parts)
        if rest or part_inputs % inputs_at_once:
            return None

        stage_bytes = (tokens + self.halves * size) * inputs_at_once * _NUMBER_BYTES
        room = self.shared_bytes // programs_each - _OTHER_SHARED_BYTES
        stages = min(self._most_stages(tokens, part_inputs), room // stage_bytes)
        if stages < (_STAGES_OF_LONG if is_long else _FEWEST_STAGES):
            return None  # a long tile with fewer was not measured
        return LinearTile(tokens, size, parts, inputs_at_once, stages)

    def _most_stages(self, tokens: int, part_inputs: int) -> int:
        if tokens == _LONG_TOKENS:
            return _STAGES_OF_LONG
        is_long_sum = part_inputs > _LONG_SUM and tokens > _TOKENS[0] and self.halves == 1
        return _STAGES_OF_LONG_SUMS if is_long_sum else _STAGES

    def cost(self, tile: LinearTile) -> float:
        """Bytes that a multiprocessor copies; all other work counts as bytes, too."""
        programs = self._programs(tile.tokens, tile.outputs, tile.parts)
        rows = tile.tokens + self.halves * tile.outputs
        copied = rows * (self.inputs // tile.parts) * _NUMBER_BYTES
        num_written = tile.tokens * tile.outputs
        written = num_written * (_NUMBER_BYTES if tile.parts == 1 else _PART_BYTES)
        programs_each = -(-programs // self.num_processors)
        cost: float = programs_each * (_COST_OF_PROGRAM + copied + _COST_OF_RESULT * written)
        if tile.parts > 1:
            added_up = programs * num_written * _PART_BYTES / self.num_processors
            cost += _COST_OF_RESULT * added_up
        return cost * _COST_OF_LONG if tile.tokens == _LONG_TOKENS else cost

    def _programs(self, tokens: int, size: int, parts: int) -> int:
        return -(-self.outputs // size) * -(-self.num_tokens // tokens) * parts
