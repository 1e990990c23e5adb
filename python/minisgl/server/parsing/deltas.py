"""The pieces of an answer as they come: content, reasoning, tool calls.

An `OutputParser` makes the deltas from the text of a model. Each answer has a parser of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from io import StringIO
from typing import TypeAlias

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    """More text for the user.

    Attributes:
        start: of this delta, and of others with text: where it begins, in characters of the
            answer's text.
    """

    text: str
    start: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More text of the model's reasoning."""

    text: str
    start: int = 0


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool is called; its arguments follow."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str
    start: int = 0


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(ABC):
    """Parses the text of one answer as it comes.

    Attributes:
        position: the number of characters of the answer that it has parsed. To parse only the rest
            of an answer, set it first.
    """

    position: int = 0

    @property
    def num_reasoning(self) -> int:
        """How many characters at the beginning of the answer are reasoning, with its markers."""
        return 0

    @abstractmethod
    def feed(self, text: str, *, is_last: bool) -> list[Delta]:
        """The deltas that are certain now; none is empty.

        Args:
            is_last: no more text will come, so nothing may be held back.
        """


class PlainTextParser(OutputParser):
    """All text is content."""

    def feed(self, text: str, *, is_last: bool) -> list[Delta]:  # noqa: ARG002 - nothing is held back
        start = self.position
        self.position += len(text)
        return [ContentDelta(text, start)] if text else []


class GrowingText:
    """A text that comes in pieces. The time for it is linear in its length.

    `+=` would copy all of it for each piece, unless it is a local variable.
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = StringIO()

    def append(self, piece: str) -> None:
        self._buffer.write(piece)

    def __str__(self) -> str:
        return self._buffer.getvalue()


@dataclass
class ParsedText:
    """A run of content or of reasoning."""

    is_reasoning: bool
    pieces: GrowingText = field(default_factory=GrowingText)

    @property
    def text(self) -> str:
        return str(self.pieces)


@dataclass
class ParsedCall:
    """A tool call."""

    id: str
    name: str
    pieces: GrowingText = field(default_factory=GrowingText)  # of its arguments

    @property
    def arguments(self) -> str:
        return str(self.pieces)


@dataclass
class ParsedOutput:
    """All that was parsed from an answer so far: texts and calls, in the order of the answer.

    Attributes:
        keeps_text: whether content and reasoning are kept; calls always are.
        has_content: whether there was any content, kept or not.
    """

    keeps_text: bool = True
    has_content: bool = False
    parts: list[ParsedText | ParsedCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case ContentDelta(text):
                self.has_content = True
                self._add_text(text, is_reasoning=False)
            case ReasoningDelta(text):
                self._add_text(text, is_reasoning=True)
            case ToolCallStart(_, id, name):
                self.parts.append(ParsedCall(id, name))
            case ToolCallArguments(_, text):
                call = self.parts[-1]
                assert isinstance(call, ParsedCall)
                call.pieces.append(text)

    def _add_text(self, text: str, *, is_reasoning: bool) -> None:
        if not self.keeps_text:
            return
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, ParsedText) or last.is_reasoning != is_reasoning:
            last = ParsedText(is_reasoning)
            self.parts.append(last)
        last.pieces.append(text)

    @property
    def content(self) -> str:
        return self._joined_text(is_reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._joined_text(is_reasoning=True)

    def _joined_text(self, *, is_reasoning: bool) -> str:
        texts = [part for part in self.parts if isinstance(part, ParsedText)]
        return "".join(part.text for part in texts if part.is_reasoning == is_reasoning)

    @property
    def calls(self) -> list[ParsedCall]:
        return [part for part in self.parts if isinstance(part, ParsedCall)]
