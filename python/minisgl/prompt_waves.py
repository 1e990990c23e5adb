"""The portions in which a device computes the attention of prompts.

An attention backend knows them, and the scheduler counts in them how long a step will take. Next to
read: `scheduler/pacing/costs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptWaves:
    """The portions in which a device computes the attention of prompts: tiles, and waves of them.

    A kernel cuts each slice into tiles of some tokens. A processor of the device takes one head of
    a tile at a time, and all processors together take a wave of them. The last wave takes as long
    as a full one. So 6 tiles of 40 heads take 132 processors two waves, and 7 tiles take three.

    The values by default are those of a device whose time grows with each token.

    Attributes:
        tile: tokens of a tile.
        num_heads: query heads of a rank.
    """

    tile: int = 1
    num_heads: int = 1
    num_processors: int = 1

    def num_tiles(self, num_tokens: int) -> int:
        """Tiles of a slice."""
        return -(-num_tokens // self.tile)

    def tokens_of_time(self, num_tiles: int) -> float:
        """How many tokens would take as long as these tiles if all waves were full."""
        num_waves = -(-num_tiles * self.num_heads // self.num_processors)
        return num_waves * self.num_processors / self.num_heads * self.tile
