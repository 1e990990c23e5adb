"""The grammars of `FakeMatchers`: when a match is complete, and when tokens are forced."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from minisgl.core import Grammar


@dataclass(frozen=True)
class Script:
    """Which part of an answer a grammar determines.

    Attributes:
        num_tokens: of the answer that is a match.
        runs: lengths of which one is drawn, for each number of known tokens, from a seed.
        is_broken: whether the match ends with an error in the place of its last token.
    """

    num_tokens: int
    seed: int = 0
    runs: tuple[int, ...] = (0,)
    is_broken: bool = False

    @property
    def grammar(self) -> Grammar:
        runs = ",".join(map(str, self.runs))
        return Grammar("regex", f"{self.num_tokens} {self.seed} {runs} {int(self.is_broken)}")

    @staticmethod
    def of(grammar: Grammar) -> Script:
        num_tokens, seed, runs, is_broken = grammar.text.split()
        lengths = tuple(map(int, runs.split(",")))
        return Script(int(num_tokens), int(seed), lengths, is_broken=is_broken == "1")

    def num_forced(self, num_output: int) -> int:
        """Tokens that are forced after those of an answer."""
        length = Random(f"{self.seed} {num_output}").choice(self.runs)
        return min(length, self.num_tokens - num_output - self.is_broken)
