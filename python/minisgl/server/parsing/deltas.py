"""What an answer says, piece by piece: content, reasoning, calls of tools. One stream for every shape of answer.

A `Reader` makes it of the text as it comes; each answer has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the user is to read."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool is called; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallBegin | CallArguments


class Reader(ABC):
    """Finds in the text of one answer what it says."""

    @abstractmethod
    def feed(self, text: str, *, ends: bool) -> list[Delta]:
        """What is certain now. With `ends` no more text will come, and nothing may be held back. No delta is empty."""


class PlainReader(Reader):
    """All text is content."""

    def feed(self, text: str, *, ends: bool) -> list[Delta]:  # noqa: ARG002
        return [Content(text)] if text else []


@dataclass
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Transcript:
    """All that an answer has said so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegin(_, id, name):
                self.calls.append(Call(id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
