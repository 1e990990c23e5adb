"""Models that reason before they answer: how to parse the reasoning, and how a grammar allows it.

    <think> … </think> answer        qwen3
            … </think> answer        deepseek_r1: the chat template has begun the reasoning

Only blanks around the markers are dropped. Text after a marker that is never closed is reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from minisgl.core import Grammar
from minisgl.server.parsing.deltas import OutputParser, ReasoningDelta
from minisgl.server.parsing.grammar_rules import (
    AddedTokens,
    marker_rule,
    nested_grammar,
    text_rules,
)
from minisgl.server.parsing.incremental import IncrementalParser

SWITCHES = ("reasoning_effort", "enable_thinking")  # variables of chat templates
_BEGIN = "<think>"
_END = "</think>"
_OPENING = regex.compile(rf"\s*{_BEGIN}")
_CLOSING = regex.compile(rf"(?<!\s)\s*{_END}")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    Attributes:
        is_open: the chat template begins the reasoning, so the answer begins inside it.
    """

    is_open: bool

    def make_parser(self, rest: OutputParser, *, allows_reasoning: bool) -> OutputParser:
        """A parser of reasoning, which passes the text after it to `rest`.

        Args:
            allows_reasoning: if not, the template does not begin the reasoning.
        """
        return ReasoningParser(rest, is_open=self.is_open and allows_reasoning)

    def allow_before(self, grammar: Grammar, added_tokens: AddedTokens) -> Grammar:
        """A grammar of reasoning and then an answer.

        Reasoning is optional, unless the template begins it.
        """
        begin = marker_rule(_BEGIN, added_tokens)
        reasoning = f"{begin}? text GAP" if self.is_open else f"({begin} text GAP)?"
        rules = [
            f"start: {reasoning} answer",
            *text_rules(_END, added_tokens),
            r"GAP: /[ \r\n]{0,4}/",
            f"answer: {nested_grammar(grammar)}",
        ]
        return Grammar("lark", "\n".join(rules))


def has_reasoning_switch(chat_template: str | None) -> bool:
    """Whether a template has a variable that says how much to reason."""
    return any(switch in (chat_template or "") for switch in SWITCHES)


REASONING_FORMATS = {
    "qwen3": ReasoningFormat(is_open=False),
    "deepseek_r1": ReasoningFormat(is_open=True),
}


class ReasoningParser(IncrementalParser):
    """Parses the reasoning at the beginning of an answer, if there is any."""

    def __init__(self, rest: OutputParser, *, is_open: bool) -> None:
        super().__init__()
        self._rest = rest
        self._is_open = is_open
        self._is_reasoning = False
        self._num_reasoning = 0  # when it has ended

    @property
    def num_reasoning(self) -> int:
        return self._num_fed if self._is_reasoning else self._num_reasoning

    def _begin(self, is_last: bool) -> bool:
        opening = _OPENING.match(self._held, partial=not is_last)
        if opening is None:
            return self._begin_reasoning() if self._is_open else self._begin_rest()
        if opening.partial:
            return False
        self._take(opening.end())
        return self._begin_reasoning()

    def _begin_reasoning(self) -> bool:
        self._is_reasoning = True
        return self._go_to(self._before_reasoning)

    def _before_reasoning(self, is_last: bool) -> bool:  # noqa: ARG002 - a state
        self._take_blanks()
        return bool(self._held) and self._go_to(self._in_reasoning)

    def _in_reasoning(self, is_last: bool) -> bool:
        closing = _CLOSING.search(self._held, partial=not is_last)
        if closing is None:
            self._emit_text(ReasoningDelta, self._take(len(self._held)))
            return False
        self._emit_text(ReasoningDelta, self._take(closing.start()))
        if closing.partial:
            return False
        self._take(closing.end() - closing.start())
        self._is_reasoning = False
        self._num_reasoning = self.position
        return self._go_to(self._before_rest)

    def _before_rest(self, is_last: bool) -> bool:  # noqa: ARG002 - a state
        self._take_blanks()
        return bool(self._held) and self._begin_rest()

    def _begin_rest(self) -> bool:
        self._rest.position = self.position
        return self._go_to(self._in_rest)

    def _in_rest(self, is_last: bool) -> bool:
        self._deltas += self._rest.feed(self._take(len(self._held)), is_last=is_last)
        return False
