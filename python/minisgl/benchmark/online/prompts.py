"""From the blocks of a prompt to its token ids, or to a text of about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.benchmark.online.workloads import Block

# Words that nearly every vocabulary has as one token, with the space before each.
_TEXT = (
    "the of and to in is that it was for on are with as at by from have or had not but what all "
    "were when we there can an your which their said if do will each about how up out them then "
    "she many some so these would other into has more her two like him see time could no make "
    "than first been its who now people my made over did down only way find use may water long "
    "little very after called just where most know"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of a run. Equal seeds, runs and blocks always give equal tokens.

    Attributes:
        seed: of all runs of one call of the benchmark; at least 0 and below 2**32.
        token_ids: (least, most) token id.
        as_text: whether prompts are texts of as many words instead.
        run: the number of the run, from 0. Its prompts are no other run's of any seed.
    """

    seed: int
    token_ids: tuple[int, int] = (100, 9_999)
    as_text: bool = False
    run: int = 0

    def prompt(self, blocks: Sequence[Block]) -> list[int] | str:
        ids = [token for block in blocks for token in self._block(block)]
        if not self.as_text:
            return ids
        return " ".join(_WORDS[token % len(_WORDS)] for token in ids)

    def _block(self, block: Block) -> list[int]:
        generator = np.random.default_rng([self.seed, self.run, block.key])
        low, high = self.token_ids
        ids: list[int] = generator.integers(low, high, block.num_tokens, endpoint=True).tolist()
        return ids
