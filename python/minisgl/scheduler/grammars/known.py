"""Grammars that were tried, and the memory that they take.

A grammar takes memory when it is compiled, which its trial has measured, and more while answers
follow it: the automaton that its matchers share grows, up to its limit of states. By how much
cannot be known beforehand, and llguidance does not report it. So it is measured as it happens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from llguidance import LLMatcher

from minisgl.core import Grammar
from minisgl.errors import Unavailable
from minisgl.grammar import refused

_CACHE_BYTES = 2**28  # of grammars that are kept
_CHARACTER_BYTES = 4
_ENTRY_BYTES = 1024  # of a grammar that is refused, beside its text


@dataclass(slots=True, eq=False)
class KnownGrammar:
    """A grammar that was tried. It is kept until it is forgotten and no answer follows it.

    Attributes:
        matchers: in their first state; copies of them follow the answers. Empty if the grammar
            is refused.
        error: why it is refused, or could not be tried or compiled.
        is_untried: whether the error is not the fault of the grammar.
        compiled_bytes: memory that it took when it was compiled. All ranks have the same number.
        grown_bytes: memory that it took while answers followed it, as this rank has measured.
        num_open: answers that follow it.
        is_kept: whether new requests find it.
    """

    grammar: Grammar
    matchers: deque[LLMatcher]
    error: str | None
    compiled_bytes: int
    is_untried: bool = False
    grown_bytes: int = 0
    num_open: int = 0
    is_kept: bool = True

    @property
    def num_bytes(self) -> int:
        return self.compiled_bytes + self.grown_bytes

    def copy_matcher(self) -> LLMatcher:
        """Return a copy of a matcher, of each in turn."""
        self.matchers.rotate()
        return self.matchers[0].deep_copy()


class KnownGrammars:
    """Grammars that were tried, the latest used ones, up to a number of bytes.

    All ranks keep the same ones, because a request with any other grammar waits for a trial. So
    only the bytes count here that a grammar took when it was compiled.

    Attributes:
        freed_bytes: by how much grammars had grown that were freed since this was set to 0.
    """

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        self.freed_bytes = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[Grammar, KnownGrammar] = OrderedDict()
        self._refused_for_now: list[Grammar] = []

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._known

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[KnownGrammar]:
        """All that are kept, the oldest first."""
        return list(self._known.values())

    def add(self, grammar: Grammar, matchers: list[LLMatcher], num_bytes: int) -> None:
        """Keep a grammar. Each of its matchers was compiled by itself, to `num_bytes`."""
        num_bytes = num_bytes * len(matchers) + _bytes_of(grammar)
        self._add(KnownGrammar(grammar, deque(matchers), None, num_bytes))

    def add_refused(self, grammar: Grammar, error: str, *, is_lasting: bool = True) -> None:
        """Remember why a grammar is refused, up to `forget_refused_for_now` if it does not last."""
        self._add(KnownGrammar(grammar, deque(), error, _bytes_of(grammar)))
        if not is_lasting:
            self._refused_for_now.append(grammar)

    def add_untried(self, grammar: Grammar, error: str) -> None:
        """Remember why nothing is known of a grammar, up to `forget_refused_for_now`."""
        self._add(KnownGrammar(grammar, deque(), error, _bytes_of(grammar), is_untried=True))
        self._refused_for_now.append(grammar)

    def forget_refused_for_now(self) -> None:
        """Forget errors that do not last: the next request with the grammar has it tried."""
        while self._refused_for_now:
            self.forget(self._refused_for_now.pop())

    def forget(self, grammar: Grammar) -> None:
        """Forget a grammar, if it is here: the next request with it has it compiled again."""
        known = self._known.pop(grammar, None)
        if known is not None:
            self._drop(known)

    def _add(self, known: KnownGrammar) -> None:
        assert known.grammar not in self._known
        self._known[known.grammar] = known
        self._num_bytes += known.compiled_bytes
        while self._num_bytes > self._max_bytes and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._drop(oldest)

    def _drop(self, known: KnownGrammar) -> None:
        self._num_bytes -= known.compiled_bytes
        known.is_kept = False
        self._count_freed(known)

    def _count_freed(self, known: KnownGrammar) -> None:
        if not known.is_kept and known.num_open == 0:
            self.freed_bytes += known.grown_bytes

    def open(self, grammar: Grammar) -> KnownGrammar:
        """Return a known grammar, which one more answer follows now.

        Raises:
            InvalidRequest: the grammar was refused.
            Unavailable: it could not be tried, or compiled.
        """
        self._known.move_to_end(grammar)
        known = self._known[grammar]
        if known.error is not None and known.is_untried:
            raise Unavailable(known.error)
        if known.error is not None:
            raise refused(known.error)
        known.num_open += 1
        return known

    def close(self, known: KnownGrammar) -> None:
        """Note that an answer no longer follows it."""
        known.num_open -= 1
        self._count_freed(known)


def _bytes_of(grammar: Grammar) -> int:
    return len(grammar.text) * _CHARACTER_BYTES + _ENTRY_BYTES
