"""The tiles in which a step's experts are multiplied: tuned ones from a file, or those of a rule.

A file in `tuned/` is for one device and one shape of experts; docs/extending.md has the command
that writes it. The choice depends on the number of tokens alone, so a captured step keeps it.
Ranks need not choose alike: each adds up its own columns of the experts, or its own experts, and
all ranks get the same sum over ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedInfo
from minisgl.errors import ConfigError
from minisgl.kernel import ExpertTiles, ProductTile

TUNED_FOLDER = Path(__file__).parent / "tuned"
_Count = Annotated[int, msgspec.Meta(ge=1)]

# Up to so many tokens seldom choose an expert in common, so nothing is gained by sorting them.
_MOST_BY_TOKEN = 4
_PROGRAMS = 528  # several for each processor of a large GPU


def _tiles(pairs: int, rows: int, row_bytes: int, num_warps: int, num_stages: int) -> ExpertTiles:
    tile = ProductTile(rows, row_bytes, num_warps, num_stages, _PROGRAMS)
    return ExpertTiles(pairs, tile, tile)


# The rule: tiles by the largest mean number of pairs per expert for which they are used.
_TILES = {
    2: _tiles(16, 64, 256, 4, 3),
    8: _tiles(16, 128, 256, 4, 3),
    16: _tiles(32, 128, 128, 4, 4),
    32: _tiles(64, 128, 128, 4, 4),
    96: _tiles(64, 256, 128, 8, 3),
}
_LARGEST_TILES = _tiles(128, 256, 128, 8, 3)


class ExpertShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The experts of a layer on one rank.

    Attributes:
        each: experts that a token chooses, among those of all ranks.
        dtype: its name without "torch.".
        ep: ranks that divide the experts of a layer; each has `num_experts`.
    """

    num_experts: _Count
    each: _Count
    width: _Count
    mlp_width: _Count
    dtype: str
    ep: _Count = 1

    @property
    def num_routed(self) -> int:
        """The experts that a token chooses among."""
        return self.num_experts * self.ep

    @property
    def file_name(self) -> str:
        experts = f"e{self.num_experts}" if self.ep == 1 else f"e{self.num_experts}-ep{self.ep}"
        sizes = f"{experts}-a{self.each}-d{self.width}-f{self.mlp_width}"
        return f"{sizes}-{self.dtype}.json"


def expert_shape(
    model: ModelConfig, info: DistributedInfo, dtype: torch.dtype
) -> ExpertShape | None:
    """The shape of a layer's experts on a rank; None if the model has none.

    Raises:
        ConfigError: the ranks do not divide the width of an expert, or the experts.
    """
    if not model.num_experts:
        return None
    return ExpertShape(
        num_experts=len(info.shard_experts(model.num_experts)),
        each=model.experts_per_token,
        width=model.width,
        mlp_width=len(info.shard_expert_columns(model.expert_width)),
        dtype=str(dtype).removeprefix("torch."),
        ep=info.size if info.ep else 1,
    )


class TiledSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of more tokens than the entry before it has, and up to `num_tokens`."""

    num_tokens: _Count
    tiles: ExpertTiles


class TileTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles of all steps.

    Args:
        most_by_token: the largest step, in tokens, that takes no tiles.
        steps: in ascending order; the last one serves all larger steps, too.

    Raises:
        ValueError: there are no steps, or their numbers of tokens do not ascend.
    """

    most_by_token: Annotated[int, msgspec.Meta(ge=0)]
    steps: tuple[TiledSteps, ...]

    def __post_init__(self) -> None:
        numbers = [self.most_by_token, *(entry.num_tokens for entry in self.steps)]
        if len(numbers) == 1 or numbers != sorted(set(numbers)):
            raise ValueError(f"numbers of tokens do not ascend: {numbers}")

    @property
    def nums_of_tokens(self) -> list[int]:
        """The largest step of each entry, and 1 for the steps that take no tiles."""
        by_token = [1] if self.most_by_token else []
        return [*by_token, *(entry.num_tokens for entry in self.steps)]

    def find(self, num_tokens: int) -> ExpertTiles | None:
        """The tiles of a step; None if its experts are multiplied token by token."""
        if num_tokens <= self.most_by_token:
            return None
        for entry in self.steps:
            if num_tokens <= entry.num_tokens:
                return entry.tiles
        return self.steps[-1].tiles


class _TunedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file: the table, its device and shape, and how it was made."""

    device: str
    shape: ExpertShape
    table: TileTable
    made: dict[str, Any]


@functools.cache
def rule_table(num_experts: int, each: int) -> TileTable:
    """The tiles of steps where nothing was tuned, by the mean number of pairs per expert.

    Args:
        num_experts: that a token chooses among.
    """
    steps: list[TiledSteps] = []
    for pairs_an_expert, tiles in _TILES.items():
        most = pairs_an_expert * num_experts // each
        if most > _MOST_BY_TOKEN:
            steps.append(TiledSteps(most, tiles))
    largest = steps[-1].num_tokens + 1
    return TileTable(_MOST_BY_TOKEN, (*steps, TiledSteps(largest, _LARGEST_TILES)))


def tuned_path(device_name: str, shape: ExpertShape) -> Path:
    """Where the file is, if there is one.

    Args:
        device_name: as CUDA reports it.
    """
    folder = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return TUNED_FOLDER / folder / shape.file_name


def find_tuned_table(device_name: str, shape: ExpertShape) -> TileTable | None:
    """Read the table of a device and a shape; None if they are not tuned.

    Raises:
        ConfigError: the file is damaged, or is for another device or shape.
    """
    path = tuned_path(device_name, shape)
    if not path.exists():
        return None
    try:
        tuned = msgspec.json.decode(path.read_bytes(), type=_TunedFile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} has no tiles of experts: {error}") from None
    if (tuned.device, tuned.shape) != (device_name, shape):
        raise ConfigError(
            f"{path} has tiles for {tuned.shape.file_name} on {tuned.device}, "
            f"and not for {shape.file_name} on {device_name}"
        )
    return tuned.table


def write_tuned_table(
    path: Path, device_name: str, shape: ExpertShape, steps: Sequence[TiledSteps],
    most_by_token: int, made: dict[str, Any],
) -> None:  # fmt: skip
    """Write a file that `find_tuned_table` reads.

    Args:
        made: how it was made: command, commit, versions.
    """
    table = TileTable(most_by_token, tuple(steps))
    encoded = msgspec.json.encode(_TunedFile(device_name, shape, table, made))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
