"""Which part of a tensor-parallel group this process is, and which part of a tensor falls to it."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """Rank in [0, size) of a tensor-parallel group."""

    rank: int = 0
    size: int = 1

    @property
    def is_primary(self) -> bool:
        return self.rank == 0

    def shard(self, total: int, what: str) -> range:
        """The part of `total` equal units that this rank holds.

        Raises:
            ConfigError: the units cannot be divided; names what they are.
        """
        if total % self.size:
            raise ConfigError(f"--tp {self.size} does not divide the model's {total} {what}")
        each = total // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def shard_padded(self, total: int) -> range:
        """Like `share`, but the last ranks may hold fewer, or none."""
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))

    def shard_kv_heads(self, total: int) -> range:
        """The kv heads of this rank; where the ranks outnumber them, each head is held by several ranks."""
        if total >= self.size:
            return self.shard(total, "key/value heads")
        if self.size % total:
            raise ConfigError(
                f"--tp {self.size} is not a multiple of the model's {total} key/value heads"
            )
        head = self.rank * total // self.size
        return range(head, head + 1)
