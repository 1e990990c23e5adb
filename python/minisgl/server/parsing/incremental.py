"""What readers of marked-up answers have in common: text that is held back until it is certain what it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from minisgl.server.parsing.deltas import CallArguments, CallBegin, Delta, Reader

Step: TypeAlias = Callable[[bool], bool]


class StepReader(Reader):
    """A machine whose state is a method: it takes what it understands off the held text.

    A step returns whether there may be more to do; it is told whether more text will come. What it makes of a text does
    not depend on the pieces in which the text comes.
    """

    def __init__(self) -> None:
        self._held = ""
        self._said: list[Delta] = []
        self._step: Step = self._begin

    @abstractmethod
    def _begin(self, ends: bool) -> bool:
        """The first state."""

    def feed(self, text: str, *, ends: bool) -> list[Delta]:
        self._held += text
        while self._step(ends):
            pass
        said, self._said = self._said, []
        return said

    def _go_to(self, step: Step) -> bool:
        self._step = step
        return True

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _say(self, delta: Delta) -> None:
        if isinstance(delta, CallBegin | CallArguments) or delta.text:
            self._said.append(delta)
