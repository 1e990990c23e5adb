"""How a Hopper GPU divides the product of some tokens with a large weight among its blocks.

Such a product is bound by reading the weight. Each block has some of the weight's rows, for all
tokens; the blocks run at once and read about as much each. Where a few blocks would do for all
rows, the inputs are divided, too. The reader of such a sum then adds up its parts.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_TOKENS_OF_ROWS = 192  # for more, a product is bound by its multiplications
# Smaller weights are faster in the tiles of `linear_tiles.py` or in torch. On an H200, with the
# norm before or behind it, these first, µs: 64 tokens, 1,024 inputs and 4,096 outputs 5.7 and 6.0;
# 2,048 inputs and 5,120 outputs 10.2 and 9.2. With parts: 6,144 inputs and 2,048 outputs 11.5 and
# 13.2; 4,096 inputs and 4,096 outputs 15.0 and 14.1.
_FEWEST_NUMBERS = 10_000_000
_FEWEST_NUMBERS_IN_PARTS = 16_000_000
_ROW_STEP = 8
_FEWEST_ROWS = 32  # with fewer, the tokens are copied too often; not measured
_GROUP = 64  # rows that a warpgroup multiplies
# So many tokens are copied too often for tiles of fewer rows than a group's. On an H200, 192 tokens
# with 5,120 inputs and 5,120 outputs took 26.8 µs with 40 rows, and 25.7 with 64.
_TOKENS_OF_GROUPS = 128
# So many inputs have tiles of two groups. On an H200, 14,336 inputs, 4,096 outputs and 64 tokens
# took 34.6 µs with two, and 39.2 with one.
_LONG_SUM = 8192
_MOST_PARTS = 6
# Groups whose sums fit the registers, by tokens; `most_groups` of csrc/row_tiles.cu.
_MOST_GROUPS = ((64, 5), (128, 4), (MOST_TOKENS_OF_ROWS, 3))
_MOST_GROUPS_OF_SUMS = 2


class RowTile(NamedTuple):
    """What one block multiplies with all tokens.

    Attributes:
        rows: of the weight, or of each of its halves.
        parts: of the inputs; a block has one of them.
    """

    rows: int
    parts: int


def row_tile(
    num_tokens: int,
    outputs: int,
    inputs: int,
    *,
    halves: int,
    may_divide: bool,
    num_processors: int,
) -> RowTile | None:
    """The tile of a product, or None where other kernels are as fast.

    Args:
        outputs: of the product, or of each half of a weight of gate and up.
        halves: 2 for gate and up, 1 for any other weight.
        may_divide: whether there may be parts.
        num_processors: multiprocessors of the GPU.
    """
    num_numbers = halves * outputs * inputs
    if not 1 < num_tokens <= MOST_TOKENS_OF_ROWS or num_numbers < _FEWEST_NUMBERS:
        return None
    if outputs % _ROW_STEP or inputs % _ROW_STEP:
        return None
    if may_divide:
        rows = 2 * _GROUP if inputs > _LONG_SUM else _GROUP
        parts = min(_MOST_PARTS, num_processors // -(-outputs // rows))
        if parts > 1:
            return RowTile(rows, parts) if num_numbers >= _FEWEST_NUMBERS_IN_PARTS else None
    rows = -(-outputs // (num_processors * _ROW_STEP)) * _ROW_STEP
    if num_tokens > _TOKENS_OF_GROUPS:
        rows = max(rows, _GROUP)
    has_room = halves * rows <= _GROUP * _most_groups(num_tokens, halves)
    return RowTile(rows, 1) if has_room and halves * rows >= _FEWEST_ROWS else None


def _most_groups(num_tokens: int, halves: int) -> int:
    if halves == 1:
        return _MOST_GROUPS_OF_SUMS
    return next(groups for tokens, groups in _MOST_GROUPS if num_tokens <= tokens)
