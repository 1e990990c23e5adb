"""Values in errors: a few characters of each, whatever its size."""

from __future__ import annotations

import reprlib

_MAX_TEXT = 80  # characters of a text, or of a value of a class that is not known here
_MAX_BITS = 136  # some 40 digits


class _Excerpts(reprlib.Repr):
    """Names the size of a large integer: reprlib writes it whole first, or fails at it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = _MAX_TEXT
        self.maxother = _MAX_TEXT

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MAX_BITS:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


def excerpt(value: object) -> str:
    """A value's repr, shortened if it is long."""
    return _Excerpts().repr(value)


def with_utf8(text: str) -> str:
    """A text that can be sent: half a surrogate pair, which has no UTF-8, becomes its escape."""
    return text.encode(errors="backslashreplace").decode()
