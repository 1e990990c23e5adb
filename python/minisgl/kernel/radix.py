"""Key compare of the radix tree."""

from __future__ import annotations

from minisgl.core import IntArray


def common_prefix_length(a: IntArray, b: IntArray) -> int:
    """Number of leading tokens that a and b share; both int32, one-dimensional, on the host."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
