"""How much an engine can hold, and how long a sequence may be."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.checkpoint import ModelConfig
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RowLimits:
    """How long the rows of the tables are.

    Attributes:
        max_seq_len: tokens of a prompt and its answer together.
    """

    page_size: int
    max_seq_len: int

    @property
    def num_row_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def num_row_tokens(self) -> int:
        """Tokens of the longest sequence, and one more.

        A step samples a token after any prompt, also after one that fills the context and wants
        none.
        """
        return self.max_seq_len + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits(RowLimits):
    """How much the engine can hold; the scheduler plans within these limits.

    `max_seq_len` is the model's context or what the user says, or less where the pool is smaller.

    Attributes:
        num_rows: requests that can hold pages at the same time.
        is_pool_shorter: whether `max_seq_len` is all tokens of the pool, and less than it would be.
        kv_bytes: of a token's keys and values in one layer, on one rank.
    """

    num_pages: int
    num_rows: int
    vocab_size: int
    eos_ids: frozenset[int]
    kv_bytes: int
    is_pool_shorter: bool = False


def context_length(config: EngineConfig, model: ModelConfig) -> int:
    """Positions that the model can tell apart, or fewer if the user says so.

    Raises:
        ConfigError: the user wants more.
    """
    limit = model.max_position
    if config.max_seq_len is not None and config.max_seq_len > limit:
        raise ConfigError(
            f"--max-seq-len must be <= {limit} (the model's context), got {config.max_seq_len}"
        )
    return config.max_seq_len or limit


def most_tokens(config: EngineConfig, num_rows: int) -> int:
    """The most tokens of a step: those of prompts, and a decode of every request."""
    assert config.max_prefill_length
    return config.max_prefill_length + num_rows
