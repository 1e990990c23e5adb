"""A parser of marked-up text, which holds text back until it is certain what it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakMethod

from minisgl.server.parsing.deltas import Delta, OutputParser, ToolCallArguments, ToolCallStart

State: TypeAlias = Callable[[bool], bool]


class IncrementalParser(OutputParser):
    """A state machine whose states are methods.

    A state takes the text that it understands off the held text.

    A state gets `is_last`: whether no more text will come. It returns whether the state after it
    has to run now. The deltas do not depend on the pieces in which the text comes.
    """

    def __init__(self) -> None:
        self._held = ""
        self._deltas: list[Delta] = []
        self._go_to(self._begin)

    @abstractmethod
    def _begin(self, is_last: bool) -> bool:
        """The first state."""

    def feed(self, text: str, *, is_last: bool) -> list[Delta]:
        self._held += text
        while self._run_state(is_last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _go_to(self, state: State) -> bool:
        # Weak, or each parser would keep itself, and its request, until garbage is collected.
        self._state = WeakMethod(state)
        return True

    def _run_state(self, is_last: bool) -> bool:
        state = self._state()
        assert state is not None
        return state(is_last)

    def _take(self, size: int) -> str:
        """Remove and return the first characters of the held text."""
        taken = self._held[:size]
        self._held = self._held[size:]
        return taken

    def _emit(self, delta: Delta) -> None:
        if isinstance(delta, ToolCallStart | ToolCallArguments) or delta.text:
            self._deltas.append(delta)
