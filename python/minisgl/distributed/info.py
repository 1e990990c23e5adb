"""The rank of this process in its tensor-parallel group, and its shards."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """Rank in [0, size) of a tensor-parallel group.

    A shard is a `range` of units (heads, columns, experts, tokens of the vocabulary).
    The ranges of ranks 0, 1, … stand in this order and cover all units.

    Attributes:
        ep: whether the ranks divide the experts of a layer, and not the width of each.
    """

    rank: int = 0
    size: int = 1
    ep: bool = False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which receives and answers."""
        return self.rank == 0

    def shard(self, total: int, what: str) -> range:
        """Return the range of `total` units that this rank has; all ranks have equally many.

        Raises:
            ConfigError: the ranks do not divide the units, which the message calls `what`.
        """
        if total % self.size:
            raise ConfigError(f"--tp {self.size} does not divide the model's {total} {what}")
        each = total // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def shard_padded(self, total: int) -> range:
        """Like `shard`, but the last ranks may have fewer units, or an empty range."""
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))

    def shard_heads(self, total: int) -> range:
        """Return the range of query heads that this rank has.

        Raises:
            ConfigError: the ranks do not divide them.
        """
        return self.shard(total, "attention heads")

    def shard_kv_heads(self, total: int) -> range:
        """Return the range of kv heads that this rank has.

        With more ranks than heads each rank has one head, and consecutive ranks have copies of it.

        Raises:
            ConfigError: neither number divides the other.
        """
        if total >= self.size:
            return self.shard(total, "key/value heads")
        if self.size % total:
            raise ConfigError(
                f"--tp {self.size} is not a multiple of the model's {total} key/value heads"
            )
        head = self.rank * total // self.size
        return range(head, head + 1)

    def shard_experts(self, total: int) -> range:
        """Return the range of a layer's experts that this rank has; without `ep` all of them.

        Raises:
            ConfigError: the ranks do not divide them.
        """
        return self.shard(total, "experts, as --ep needs") if self.ep else range(total)

    def shard_expert_columns(self, total: int) -> range:
        """Return the range of an expert's width that this rank has; with `ep` all of it.

        Raises:
            ConfigError: the ranks do not divide it.
        """
        return range(total) if self.ep else self.shard(total, "columns of an expert")
