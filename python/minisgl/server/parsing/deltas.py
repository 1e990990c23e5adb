"""What an answer consists of, piece by piece: content, reasoning, tool calls.

An `OutputParser` makes the deltas from the text of a model. Each answer has a parser of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    """More text for the user."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More text of the model's reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool is called; its arguments follow."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(ABC):
    """Parses the text of one answer as it comes."""

    @abstractmethod
    def feed(self, text: str, *, is_last: bool) -> list[Delta]:
        """The deltas that are certain now; none is empty.

        Args:
            is_last: no more text will come, so nothing may be held back.
        """


class PlainTextParser(OutputParser):
    """All text is content."""

    def feed(self, text: str, *, is_last: bool) -> list[Delta]:  # noqa: ARG002 - nothing is held back
        return [ContentDelta(text)] if text else []


@dataclass
class ParsedCall:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedOutput:
    """All that was parsed from an answer so far.

    Attributes:
        keeps_text: whether content and reasoning are kept; calls always are.
    """

    keeps_text: bool = True
    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case ContentDelta(text):
                if self.keeps_text:
                    self.content += text
            case ReasoningDelta(text):
                if self.keeps_text:
                    self.reasoning += text
            case ToolCallStart(_, id, name):
                self.calls.append(ParsedCall(id, name))
            case ToolCallArguments(index, text):
                self.calls[index].arguments += text
