"""How the served model writes tool calls and reasoning: from requests to grammars and parsers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.server.openai.tools import ToolUse
from minisgl.server.parsing.deltas import OutputParser, PlainTextParser
from minisgl.server.parsing.grammar_rules import AddedTokens
from minisgl.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.server.parsing.tool_formats import ToolFormat, choose_format


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the served model writes tool calls and reasoning. Chosen once, when the model is loaded.

    Attributes:
        tool_format: None if the format of tool calls is not known.
        reasoning_format: None if reasoning is not told apart from content.
        added_tokens: the tokens that the tokenizer never splits, and their ids.
    """

    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    added_tokens: AddedTokens = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        template: str | None,
        added_tokens: AddedTokens,
        tool_parser: str | None,
        reasoning_parser: str | None,
    ) -> Self:
        """
        Args:
            tool_parser: name of a tool format; None means what the chat template has.
            reasoning_parser: name of a reasoning format; None means none.
        """
        reasoning_format = REASONING_FORMATS[reasoning_parser] if reasoning_parser else None
        return cls(choose_format(template, tool_parser), reasoning_format, added_tokens)

    def constrain(
        self, sampling: SamplingParams, use: ToolUse, *, allows_reasoning: bool
    ) -> SamplingParams:
        """Show special tokens, and set a grammar that allows tool calls and reasoning.

        Raises:
            InvalidRequest: the tools cannot be offered, or not with these options.
        """
        if not use.offered_tools and not self.reasoning_format:
            return sampling
        grammar = sampling.grammar
        if use.offered_tools and (use.is_enforced or grammar):
            grammar = self._required_tool_format.grammar(use, self.added_tokens, grammar)
            if len(grammar.text) > MAX_GRAMMAR:
                raise InvalidRequest(
                    f"the tools' schemas have more than {MAX_GRAMMAR} characters", param="tools"
                )
        if allows_reasoning:
            grammar = self._allow_reasoning_before(grammar)
        return replace(sampling, grammar=grammar, skip_special_tokens=False)

    def _allow_reasoning_before(self, grammar: Grammar | None) -> Grammar | None:
        if grammar is None or self.reasoning_format is None:
            return grammar
        return self.reasoning_format.allow_before(grammar, self.added_tokens)

    def make_parser(self, use: ToolUse, *, allows_reasoning: bool, eager: bool) -> OutputParser:
        """A parser of one answer. Streams are parsed with `eager`; see `ToolCallParser`."""
        parser: OutputParser = PlainTextParser()
        if use.offered_tools:
            parser = self._required_tool_format.make_parser(use, eager=eager)
        if self.reasoning_format is None:
            return parser
        return self.reasoning_format.make_parser(parser, allows_reasoning=allows_reasoning)

    @property
    def _required_tool_format(self) -> ToolFormat:
        if self.tool_format is None:
            message = (
                "the model's chat template does not say how it calls tools; --tool-call-parser does"
            )
            raise InvalidRequest(message, param="tools")
        return self.tool_format
