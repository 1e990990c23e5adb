"""Values in errors: short whatever is given, and whole where that is short."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from minisgl.utils.excerpts import excerpt


class Huge(IntEnum):
    """Python writes no number of so many digits."""

    ONE = 10**5000


class Broken:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("value", [0, -1, True, None, 1.5, "é", b"a", [5, "x"], {"a": 1}, 10**39])
def test_a_short_value_is_as_python_writes_it(value: Any) -> None:
    assert excerpt(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 1000, b"x" * 1000, bytearray(1000)], ids=type)
def test_a_long_text_is_its_ends(value: Any) -> None:
    text = repr(value)
    shown = excerpt(value)
    assert len(shown) == 80
    begin, end = shown.split("...")
    assert text.startswith(begin)
    assert text.endswith(end)


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=int.bit_length)
def test_a_long_number_is_its_length_anywhere(number: int) -> None:
    words = f"an integer of {number.bit_length()} bits"
    assert excerpt(number) == words
    assert excerpt([number]) == f"[{words}]"
    assert excerpt({number: (number,)}) == f"{{{words}: ({words},)}}"


@pytest.mark.parametrize(
    "value",
    [Huge.ONE, Broken(), list(range(10**5)), [["x" * 10**4] * 100] * 100],
    ids=["number", "broken", "long", "nested"],
)
def test_any_other_value_has_a_short_excerpt(value: Any) -> None:
    assert 0 < len(excerpt(value)) < 4000
