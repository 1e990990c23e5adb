"""Comparison of two keys of the radix tree, vectorized by numpy."""

from __future__ import annotations

from minisgl.core import IntArray


def common_prefix_length(a: IntArray, b: IntArray) -> int:
    """Count the leading tokens that a and b have in common; both one-dimensional, on the host."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())  # 0, too, if nothing differs
    return first if differs[first] else length
