"""How the served model writes tool calls and reasoning: from requests to grammars and parsers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import ConfigError, InvalidRequest
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.server.parsing.deltas import OutputParser, PlainTextParser
from minisgl.server.parsing.grammar_rules import AddedTokens
from minisgl.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from minisgl.server.parsing.tool_formats import TOOL_FORMATS, ToolFormat
from minisgl.server.requests.generation_request import ConversationRequest
from minisgl.server.requests.tools import ToolUse
from minisgl.worker_info import TokenizerInfo


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the served model writes tool calls and reasoning. Chosen once, when the model is loaded.

    Attributes:
        tool_format: None if the model has no chat template, and so is never shown a tool.
        reasoning_format: None if reasoning is not separated from content.
        added_tokens: the tokens that the tokenizer never splits, and their ids.
        opens_tool_schemas: whether calls of tools that are not strict may have arguments that the
            tools' schemas do not list.
    """

    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    added_tokens: AddedTokens = field(default_factory=dict)
    opens_tool_schemas: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: TokenizerInfo,
        tool_parser: str | None,
        reasoning_parser: str | None,
        *,
        opens_tool_schemas: bool = False,
    ) -> Self:
        """
        Args:
            tool_parser: name of a tool format; None means the format of the prompts.
            reasoning_parser: name of a reasoning format; None means none.

        Raises:
            ConfigError: prompts cannot have tools in this format.
        """
        if tokenizer.describes_tools and tool_parser not in (None, "hermes"):
            raise ConfigError(
                "the model's chat template shows no tools, so they are described in the form of "
                f"hermes; --tool-call-parser must be hermes, got {tool_parser}"
            )
        tool_format = None
        name = tool_parser or tokenizer.call_format
        if name and tokenizer.chat_template is not None:
            tool_format = TOOL_FORMATS[name](tokenizer.chat_template)
        reasoning_format = REASONING_FORMATS[reasoning_parser] if reasoning_parser else None
        return cls(tool_format, reasoning_format, tokenizer.added_tokens, opens_tool_schemas)

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
        if use.offered_tools:
            grammar = self._allow_calls(use, grammar)
        if allows_reasoning:
            grammar = self._allow_reasoning_before(grammar)
        return replace(sampling, grammar=grammar, skip_special_tokens=False)

    def _allow_calls(self, use: ToolUse, grammar: Grammar | None) -> Grammar | None:
        tool_format = self._required_tool_format
        if not use.is_enforced and grammar is None:
            return None
        closed = use.close_schemas(only_strict=self.opens_tool_schemas)
        with_calls = tool_format.grammar(closed, self.added_tokens, grammar)
        if len(with_calls.text) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"the tools' schemas have more than {MAX_GRAMMAR} characters", param="tools"
            )
        return with_calls

    def _allow_reasoning_before(self, grammar: Grammar | None) -> Grammar | None:
        if grammar is None or self.reasoning_format is None:
            return grammar
        return self.reasoning_format.allow_before(grammar, self.added_tokens)

    def parser_maker(
        self, request: ConversationRequest, *, eager: bool
    ) -> Callable[[], OutputParser]:
        """Makes a parser for each answer to a request; for `eager` see `ToolCallParser`."""
        return partial(
            self.make_parser,
            request.tool_use,
            allows_reasoning=request.allows_reasoning,
            eager=eager,
        )

    def make_parser(self, use: ToolUse, *, allows_reasoning: bool, eager: bool) -> OutputParser:
        """A parser of one answer; for `eager` see `ToolCallParser`."""
        parser: OutputParser = PlainTextParser()
        if use.offered_tools:
            parser = self._required_tool_format.make_parser(use, eager=eager)
        if self.reasoning_format is None:
            return parser
        return self.reasoning_format.make_parser(parser, allows_reasoning=allows_reasoning)

    @property
    def _required_tool_format(self) -> ToolFormat:
        if self.tool_format is None:
            message = "this model has no chat template, so it cannot be shown tools"
            raise InvalidRequest(message, param="tools")
        return self.tool_format
