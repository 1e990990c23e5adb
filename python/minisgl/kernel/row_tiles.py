"""How a Hopper GPU divides the product of some tokens with a large weight among its blocks.

Such a product is bound by reading the weight. Each block has some of the weight's rows, for all
tokens; the blocks read about as much each. Long sums, and sums of a few rows, have their inputs
divided, too: the norm that reads them then adds up the parts.

tokens      weights with such tiles
2 to 64     all large ones; sums of a few rows in parts, up to 32, and of fewest rows up to 16
65 to 128   gate and up; long sums, in parts
161 to 192  gate and up, up to two tiles for each multiprocessor

The rule was tried in chains of layers of Qwen3-4B, Llama-3.1-8B and Qwen3-14B on an H200, with 16
to 192 tokens and a draft of the kernel: of 41 to 82 combinations of tiles it has the fastest, or
one within 1 µs of a layer. Sums of a few rows were tried later, with 2 to 32 tokens and Qwen3-1.7B
(docs/performance/one-gpu.md).
"""

from __future__ import annotations

from typing import NamedTuple

_MOST_TOKENS_OF_FEWEST_ROWS = 16  # with more, the tiles of `linear_tiles.py` are as fast
_MOST_TOKENS_OF_FEW_ROWS = 32
_MOST_TOKENS_OF_ALL_WEIGHTS = 64
_MOST_TOKENS_OF_LONG_SUMS = 128
_MOST_TOKENS_OF_ONE_TURN = 128  # of gate and up: one tile for each multiprocessor
_TOKENS_OF_TWO_TURNS = range(161, 193)  # with 160 cuBLAS was faster, for Qwen3-14B
MOST_TOKENS_OF_ROWS = _TOKENS_OF_TWO_TURNS[-1]

# Smaller weights are faster in the tiles of `linear_tiles.py` or in torch. On an H200, 64 tokens
# with 1,024 inputs and 4,096 outputs took 5.7 µs there, and 6.0 here.
_FEWEST_NUMBERS = 10_000_000
_ROW_STEP = 8
# What the registers hold the sums of; `most_rows` of csrc/row_tiles.cu.
_MOST_ROWS = 128
_MOST_GATED_ROWS = 136
_MOST_GATED_ROWS_OF_TWO_TURNS = 72
# With fewer rows, tiles copy the tokens too often. With fewer tiles, few multiprocessors read.
_FEWEST_ROWS = 40
_ROWS = 64
_FEWEST_TILES = 40
# So many inputs may be divided. Sums of more tokens are more to write, so they have fewer parts.
_LONG_SUM = 8192
_ROWS_OF_PARTS = 128
_MOST_PARTS = 6
# With few rows, at most this share of the multiprocessors would have a tile. On an H200 the output
# of Qwen3-4B, and the down projection of Qwen3-1.7B, take 2 to 4 µs less in parts.
_SHARE_OF_FEW_ROWS = 1 / 3
_PARTS_OF_FEW_ROWS = 4
_CLUSTER = 2  # blocks, which copy the tokens to each other


class RowTile(NamedTuple):
    """What one block multiplies with all tokens.

    Attributes:
        rows: of the weight, or of each of its halves.
        parts: of the inputs; a block has one of them.
    """

    rows: int
    parts: int


def sizes_in_rows() -> list[int]:
    """Numbers of tokens such that each choice of the rule is made at one of them, but for more."""
    most = [
        _MOST_TOKENS_OF_FEWEST_ROWS,
        _MOST_TOKENS_OF_FEW_ROWS,
        _MOST_TOKENS_OF_ALL_WEIGHTS,
        _MOST_TOKENS_OF_LONG_SUMS,
        _MOST_TOKENS_OF_ONE_TURN,
    ]
    return [*dict.fromkeys(most), _TOKENS_OF_TWO_TURNS[0] - 1, MOST_TOKENS_OF_ROWS]


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
    if not 1 < num_tokens <= MOST_TOKENS_OF_ROWS or halves * outputs * inputs < _FEWEST_NUMBERS:
        return None
    if outputs % _ROW_STEP or inputs % _ROW_STEP:
        return None
    if halves == 2:
        return _gated_tile(num_tokens, outputs, num_processors)
    if inputs >= _LONG_SUM:
        return _tile_of_long_sum(num_tokens, outputs, may_divide, num_processors)
    return _tile_of_short_sum(num_tokens, outputs, may_divide, num_processors)


def _tile_of_short_sum(
    num_tokens: int, outputs: int, may_divide: bool, num_processors: int
) -> RowTile | None:
    """In parts if few multiprocessors would have a tile."""
    rows = max(_rows_of_each(outputs, num_processors), _ROWS)
    has_tiles = rows <= _MOST_ROWS and outputs >= _FEWEST_TILES * rows
    most_tokens = _MOST_TOKENS_OF_FEW_ROWS if has_tiles else _MOST_TOKENS_OF_FEWEST_ROWS
    has_few_rows = _num_blocks(outputs, _ROWS) <= _SHARE_OF_FEW_ROWS * num_processors
    if may_divide and has_few_rows and num_tokens <= most_tokens:
        return RowTile(_ROWS_OF_PARTS, _PARTS_OF_FEW_ROWS)
    return RowTile(rows, 1) if has_tiles and num_tokens <= _MOST_TOKENS_OF_ALL_WEIGHTS else None


def _gated_tile(num_tokens: int, outputs: int, num_processors: int) -> RowTile | None:
    """A tile for each multiprocessor, or two, one after the other."""
    rows = _rows_of_each(outputs, num_processors)
    if num_tokens <= _MOST_TOKENS_OF_ONE_TURN:
        return RowTile(rows, 1) if _FEWEST_ROWS <= rows <= _MOST_GATED_ROWS else None
    if rows > _MOST_GATED_ROWS_OF_TWO_TURNS:
        rows = _rows_of_each(outputs, 2 * num_processors)
    has_tiles = _FEWEST_ROWS <= rows <= _MOST_GATED_ROWS_OF_TWO_TURNS
    return RowTile(rows, 1) if has_tiles and num_tokens in _TOKENS_OF_TWO_TURNS else None


def _tile_of_long_sum(
    num_tokens: int, outputs: int, may_divide: bool, num_processors: int
) -> RowTile | None:
    """In parts if there are too few rows for all multiprocessors, or many tokens."""
    rows = _rows_of_each(outputs, num_processors)
    has_few_tokens = num_tokens <= _MOST_TOKENS_OF_ALL_WEIGHTS
    if has_few_tokens and _FEWEST_ROWS <= rows <= _MOST_ROWS:
        return RowTile(rows, 1)
    if num_tokens > _MOST_TOKENS_OF_LONG_SUMS or not may_divide:
        return None
    if not has_few_tokens and 2 * _num_blocks(outputs, _ROWS) <= num_processors:
        return RowTile(_ROWS, 2)
    parts = min(_MOST_PARTS, num_processors // _num_blocks(outputs, _ROWS_OF_PARTS))
    return RowTile(_ROWS_OF_PARTS, parts) if parts > 1 else None


def _num_blocks(outputs: int, rows: int) -> int:
    """Of one part: whole clusters of them."""
    return -(-outputs // (_CLUSTER * rows)) * _CLUSTER


def _rows_of_each(outputs: int, num_blocks: int) -> int:
    return -(-outputs // (num_blocks * _ROW_STEP)) * _ROW_STEP
