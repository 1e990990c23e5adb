"""Models that think before they answer: their thoughts are read off the text, and a grammar lets them think.

    <think> … </think> answer        qwen3
            … </think> answer        deepseek_r1: the chat template has begun the thought

Only blanks around the markers are dropped. A thought that does not end is a thought all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from minisgl.core import Grammar
from minisgl.server.parsing.deltas import Reader, Reasoning
from minisgl.server.parsing.grammar_rules import Markers, marker, nested, text_to
from minisgl.server.parsing.incremental import StepReader

_BEGIN, _END = "<think>", "</think>"
_OPENING = regex.compile(rf"\s*{_BEGIN}")
_CLOSING = regex.compile(rf"(?<!\s)\s*{_END}")


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its thoughts.

    Attributes:
        is_open: the chat template begins a thought, so that the answer begins in the middle of it.
    """

    is_open: bool

    def make_reader(self, rest: Reader, *, thinks: bool) -> Reader:
        """Reads thoughts; the rest goes to another reader. If the template was told not to think, none is open."""
        return ThoughtReader(rest, is_open=self.is_open and thinks)

    def before(self, grammar: Grammar, markers: Markers) -> Grammar:
        """A thought, and then what a grammar allows; no thought, unless one is open already."""
        begin = marker(_BEGIN, markers)
        thought = f"{begin}? text GAP" if self.is_open else f"({begin} text GAP)?"
        rules = [f"start: {thought} answer", *text_to(_END, markers), r"GAP: /[ \r\n]{0,4}/"]
        return Grammar("lark", "\n".join([*rules, f"answer: {nested(grammar)}"]))


PARSERS = {"qwen3": Thinking(is_open=False), "deepseek_r1": Thinking(is_open=True)}


class ThoughtReader(StepReader):
    """The thought at the beginning of an answer, if there is one, is reasoning."""

    def __init__(self, rest: Reader, *, is_open: bool) -> None:
        super().__init__()
        self._rest = rest
        self._is_open = is_open

    def _begin(self, ends: bool) -> bool:
        opening = _OPENING.match(self._held, partial=not ends)
        if opening and opening.partial:
            return False
        self._take(opening.end() if opening else 0)
        return self._go_to(self._before_thought if opening or self._is_open else self._in_rest)

    def _before_thought(self, ends: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip()
        return bool(self._held) and self._go_to(self._in_thought)

    def _in_thought(self, ends: bool) -> bool:
        closing = _CLOSING.search(self._held, partial=not ends)
        self._say(Reasoning(self._take(closing.start() if closing else len(self._held))))
        if not closing or closing.partial:
            return False
        self._take(closing.end() - closing.start())
        return self._go_to(self._before_rest)

    def _before_rest(self, ends: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip()
        return bool(self._held) and self._go_to(self._in_rest)

    def _in_rest(self, ends: bool) -> bool:
        self._said += self._rest.feed(self._take(len(self._held)), ends=ends)
        return False
