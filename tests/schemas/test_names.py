"""The names of a pattern are those that Python finds by trying them."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.schemas.names import FewNames

LETTERS = "ab1-"
TEXTS = ["".join(text) for size in range(5) for text in itertools.product(LETTERS, repeat=size)]
PARTS = ("a", "b", "1", "-", "[ab]", "[a-b1]", "[b-]", "(a|b)", "(?:a|1b)", "(a[b1])")
COUNTS = ("", "", "", "?", "{2}", "{0,1}", "{1,2}")


@given(
    pattern=st.lists(
        st.lists(
            st.tuples(st.sampled_from(PARTS), st.sampled_from(COUNTS)).map("".join), max_size=2
        ).map(lambda parts: f"^{''.join(parts)}$"),
        min_size=1,
        max_size=2,
    ).map("|".join)
)
def test_they_are_what_python_matches(pattern: str) -> None:
    matched = {text for text in TEXTS if re.search(pattern, text)}
    assert {name for name in FewNames().of(pattern) if len(name) <= 4} == matched


OTHERS = [
    *("", "a", "^a", "a$", "^a*$", "^a+$", "^a{2,}$", "^.$", "^[^a]$", r"^\w$", "^a??$", "^a{2}?$"),
    *("^a|b$", "^(a$", "^a)$", "^()*$", "^[b-a]$", "^(?i)a$", "^(?i:a)$", "^?$", "^a^b$", "^[]a]$"),
    *("^[ab&&a]$", "^[a-z]{2}$", "^[0-9]{3}$", "^a$|", "^{2}$", "^[[:alpha:]]$", "^(|{2})$"),
]


@pytest.mark.parametrize("pattern", OTHERS)
def test_other_patterns_have_none_or_too_many(pattern: str) -> None:
    assert FewNames().of(pattern, 100) == set()


def test_the_work_is_bounded() -> None:
    begin = time.process_time()
    nested = "(" * 60_000 + "a" + ")" * 60_000
    for pattern in (f"^{nested}$", "^" + "a{999}" * 20_000 + "$", "^" + "[a-z]" * 26_000 + "$"):
        assert FewNames().of(pattern) == set()
    few = FewNames()
    for number in range(4_000):
        few.of(f"^[a-z]{{2}}{'b?' * 9}{number}$")
    assert few.of("^a$") == set(), "the room of a schema is used up"
    assert time.process_time() - begin < 5
