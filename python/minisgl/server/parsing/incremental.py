"""A parser of marked-up text, which holds text back until its meaning is certain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakMethod

from minisgl.server.parsing.deltas import ContentDelta, Delta, OutputParser, ReasoningDelta

State: TypeAlias = Callable[[bool], bool]

# A state may look at all held text, and take a part of it, which copies the rest.
_LOOKS = 2**9  # at a character, on average
_PIECE = 2**12  # characters


class IncrementalParser(OutputParser):
    """A state machine whose states are methods.

    A state removes the text that it understands from the held text.

    A state gets `is_last`: whether no more text will come. It returns whether the next state has to
    run now. The deltas do not depend on how the text is cut into pieces.

    Held text is scanned again and again, and a client can make it grow without end. So states run
    again only when the new text is at least a small share of the held text; a call of usual length
    never waits for that. The time for an answer is then linear in its length.
    """

    def __init__(self) -> None:
        self._held = ""
        self._new: list[str] = []  # text that no state has seen
        self._num_new = 0
        self._deltas: list[Delta] = []
        self._go_to(self._begin)

    @abstractmethod
    def _begin(self, is_last: bool) -> bool:
        """The first state."""

    def feed(self, text: str, *, is_last: bool) -> list[Delta]:
        last = max(0, len(text) - 1) // _PIECE * _PIECE
        for begin in range(0, last, _PIECE):
            self._add(text[begin : begin + _PIECE], is_last=False)
        self._add(text[last:], is_last=is_last)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, piece: str, *, is_last: bool) -> None:
        self._new.append(piece)
        self._num_new += len(piece)
        if self._num_new < len(self._held) // _LOOKS and not is_last:
            return
        self._held += "".join(self._new)
        self._new = []
        self._num_new = 0
        while self._run_state(is_last):
            pass

    def _go_to(self, state: State) -> bool:
        # Weak, or each parser would keep itself and its request alive until a garbage collection.
        self._state = WeakMethod(state)
        return True

    def _run_state(self, is_last: bool) -> bool:
        state = self._state()
        assert state is not None
        return state(is_last)

    @property
    def _num_fed(self) -> int:
        """The characters of the answer that came, also those that it holds back."""
        return self.position + len(self._held) + self._num_new

    def _take(self, size: int) -> str:
        """Remove and return the first characters of the held text."""
        taken = self._held[:size]
        self._held = self._held[size:]
        self.position += size
        return taken

    def _take_blanks(self) -> None:
        """Remove blanks from the beginning of the held text."""
        self._take(len(self._held) - len(self._held.lstrip()))

    def _emit_text(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
        """Emit text that was taken just now, if there is any."""
        if text:
            self._deltas.append(kind(text, self._start_of(text)))

    def _start_of(self, text: str) -> int:
        """Where in the answer text begins that was taken just now."""
        return self.position - len(text)
