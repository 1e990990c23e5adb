"""The sizes of the tiles in which a GPU multiplies experts (`gpu/expert_products.py`).

`moe/tiles.py` chooses among them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# Up to so many pairs of a token and an expert are sorted by one kernel; more are counted first.
MOST_PAIRS_AT_ONCE = 4096

_Size = Annotated[int, msgspec.Meta(ge=16, le=512)]


class ProductTile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the experts' products that one GPU program computes at a time.

    Attributes:
        rows: of the weight.
        row_bytes: of such a row, and of a pair's input.
        programs: at most; each multiplies one tile after the other.

    Raises:
        ValueError: a size is no power of two.
    """

    rows: _Size
    row_bytes: _Size
    num_warps: Annotated[int, msgspec.Meta(ge=1, le=16)]
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=8)]
    programs: Annotated[int, msgspec.Meta(ge=1)]

    def __post_init__(self) -> None:
        _check_powers_of_two(rows=self.rows, row_bytes=self.row_bytes, num_warps=self.num_warps)


class ExpertTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles of a step's two products.

    Attributes:
        pairs: of a token and an expert, in a tile of either product.

    Raises:
        ValueError: `pairs` is no power of two.
    """

    pairs: _Size
    gate_up: ProductTile
    down: ProductTile

    def __post_init__(self) -> None:
        _check_powers_of_two(pairs=self.pairs)


def _check_powers_of_two(**sizes: int) -> None:
    for name, size in sizes.items():
        if size & (size - 1):
            raise ValueError(f"{name} is {size}, which is no power of two")
