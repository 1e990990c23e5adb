"""How the served model spells what is not content, calls and thoughts: from requests to grammars and readers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.sampling_params import MAX_GRAMMAR
from minisgl.server.openai.tools import ToolUse
from minisgl.server.parsing.deltas import PlainReader, Reader
from minisgl.server.parsing.grammar_rules import Markers
from minisgl.server.parsing.reasoning import PARSERS, Thinking
from minisgl.server.parsing.tool_formats import ToolFormat, choose_format


@dataclass(frozen=True, slots=True)
class Dialect:
    """Chosen once, when the model is loaded.

    Attributes:
        calls: None if there is no spelling of calls that we know.
        thoughts: None if thoughts are not to be told from content.
        markers: the tokens that the tokenizer never splits.
    """

    calls: ToolFormat | None = None
    thoughts: Thinking | None = None
    markers: Markers = field(default_factory=dict)

    @classmethod
    def of(
        cls, template: str | None, markers: Markers, calls: str | None, thoughts: str | None
    ) -> Self:
        """
        Args:
            calls: name of a format; None: what the chat template has.
            thoughts: name of a parser; None: none.
        """
        return cls(choose_format(template, calls), PARSERS[thoughts] if thoughts else None, markers)

    def constrain(self, sampling: SamplingParams, use: ToolUse, *, thinks: bool) -> SamplingParams:
        """The parameters, with markers shown and the grammar of calls and thoughts.

        Raises:
            InvalidRequest: the tools cannot be offered, or not so.
        """
        if not use.offered and not self.thoughts:
            return sampling
        grammar = sampling.grammar
        if use.offered and (use.is_enforced or grammar):
            grammar = self._format.grammar(use, self.markers, grammar)
            if len(grammar.text) > MAX_GRAMMAR:
                raise InvalidRequest(
                    f"the tools' schemas have more than {MAX_GRAMMAR} characters", param="tools"
                )
        return replace(
            sampling, grammar=self.with_thoughts(grammar, thinks=thinks), skip_special_tokens=False
        )

    def with_thoughts(self, grammar: Grammar | None, *, thinks: bool) -> Grammar | None:
        """A grammar that lets the model think first, if it does."""
        if grammar and self.thoughts and thinks:
            return self.thoughts.before(grammar, self.markers)
        return grammar

    def make_reader(self, use: ToolUse, *, thinks: bool, eager: bool) -> Reader:
        """Of one answer. `eager` is for streams; see `CallReader`."""
        reader = self._format.make_reader(use, eager=eager) if use.offered else PlainReader()
        return self.thoughts.make_reader(reader, thinks=thinks) if self.thoughts else reader

    @property
    def _format(self) -> ToolFormat:
        if self.calls is None:
            message = (
                "the model's chat template does not say how it calls tools; --tool-call-parser does"
            )
            raise InvalidRequest(message, param="tools")
        return self.calls
