"""Character classes mean in a grammar what they mean in Python; what cannot is refused."""

from __future__ import annotations

import json
import re
import time
import warnings
from contextlib import nullcontext

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.schemas.json_schemas import readable_schema
from minisgl.schemas.regexes import check_regex, readable_regex
from minisgl.server.parsing.grammar_rules import nested_grammar

BYTES = LLTokenizer("byte")
ASCII = [chr(code) for code in range(128)]
AMISS_IN_JSON = "\0\x7f"  # characters that no string has, or that no class [^...] matches


def matched(source: str, texts: list[str]) -> list[str]:
    """The texts that a grammar of llguidance matches as a whole.

    Raises:
        ValueError: llguidance refuses the grammar.
    """
    matcher = LLMatcher(BYTES, source, log_level=0)
    if error := matcher.get_error():
        raise ValueError(error)
    return [text for text in texts if _is_match(matcher.deep_copy(), text)]


def _is_match(matcher: LLMatcher, text: str) -> bool:
    tokens = BYTES.tokenize_bytes(text.encode())
    is_begun: bool = matcher.validate_tokens(tokens) == len(tokens)
    return is_begun and matcher.consume_tokens(tokens) and matcher.is_accepting()


def by_regex(pattern: str, texts: list[str]) -> list[str]:
    return matched(LLMatcher.grammar_from_regex(readable_regex(pattern)), texts)


def by_lark(pattern: str, texts: list[str]) -> list[str]:
    rule = nested_grammar(Grammar("regex", pattern))
    return matched(LLMatcher.grammar_from_lark(f"start: {rule}"), texts)


def by_schema(pattern: str, texts: list[str]) -> list[str]:
    schema = readable_schema(json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"}))
    values = [json.dumps(text) for text in texts]
    found = matched(LLMatcher.grammar_from_json_schema(schema), values)
    return [json.loads(value) for value in found]


WAYS = [by_regex, by_lark, by_schema]
EXAMPLES = [
    (r"[!-/:-@[-`{-~]{2}", ["!~", "[`", "a!", "]"]),
    (r"[^[\]]{1,4}", ["a", "a-&~", "[", "a]"]),
    (r"[[(]\d{1,2}, ?\d{1,2}[)\]]", ["[1, 2]", "(10,20)", "1, 2]", "[1, 2"]),
    (r"[^[]{1,3}", ["a]b", "[", "a["]),
    (r"[a&&b]{2}", ["&b", "ab", "cc"]),
    (r"[a[b]{1,3}]", ["[]", "ab[]", "]", "ab["]),
    (r"[a~~b]", ["~", "a", "c"]),
    (r"[+--]", ["+", ",", "-", "."]),
    (r"[--a]", ["-", "/", "a", "b", "+"]),
    (r"[]-a]", ["]", "^", "a", "-", "b"]),
    (r"[^]a]", ["]", "a", "b"]),
    (r"[\x2b--a]", ["+", "-", "a", "."]),
    (r"[+-\x2f--a]", ["+", "/", "-", "0", "a", "b"]),
    (r"\[a&&b\]", ["[a&&b]", "a"]),
    (r"\\[[]", [r"\[", "["]),
    (r'[^"]+', ["a", "\\n", '"', 'a"b']),
    (r'[^"\\]*', ["a\n", "\\", '"', ""]),
    (r"[^\n]", ["\\", '"', "\n"]),
    (r"[^]\\]", ["[", "]", "\\", '"']),
    (r"(?x)[a #b]c d", [" cd", "#cd", "bcd", " c d"]),
]


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(("pattern", "texts"), EXAMPLES)
def test_a_class_holds_what_it_holds_in_python(pattern: str, texts: list[str]) -> None:
    expected = [text for text in texts if re.fullmatch(pattern, text)]
    assert expected not in ([], texts)
    for way in WAYS:
        assert way(pattern, texts) == expected


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        (r"[\d-a]", "059-a"),
        (r"[a-\d]", "059-a"),
        (r"[\d-a-c]", "059-ac"),
        (r"[\w-\s]", "059AZ_abcz- "),
    ],
)
def test_a_class_holds_what_it_holds_in_json_schema(pattern: str, characters: str) -> None:
    """By hand: Python refuses a hyphen beside a set, which ECMA-262 reads as a character."""
    texts = list("+-059:AZ[]_abcz ")
    for way in WAYS:
        assert way(pattern, texts) == [text for text in texts if text in characters]


@pytest.mark.parametrize(
    "pattern",
    [
        r'[^"\\]',
        r"[\x00-!#-\[\]-~]",
        r"[\x{0}-\x21\x23-\x5b\x5d-\x7f]",
        r"[\u0000-!]",
        r"[\p{Cc}!]",
    ],
)
def test_a_class_with_nul_matches_no_quotes_and_backslashes_in_json(pattern: str) -> None:
    assert by_schema(pattern, ['"', "\\", "!"]) == ["!"]


def test_there_are_no_classes_with_names() -> None:
    texts = ["a]", ":]", "[]", "b", "b]"]
    for way in WAYS:
        assert way("[[:alpha:]]", texts) == texts[:3]


OPENINGS = ["[", "[^", "[^^", "[b^"]  # elsewhere ^ is an anchor if the class has ended before it
PIECES = [*"[]&~-ab+z #", "&&", "--", "~~", "[:", r"\]", r"\[", r"\-", r"\\", r"\x2b", r"\d", r"\W"]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(OPENINGS), st.lists(st.sampled_from(PIECES), max_size=8))
def test_any_class_is_read_as_in_python(opening: str, items: list[str]) -> None:
    pattern = f"{opening}{''.join(items)}]"
    assume("++" not in pattern)  # behind a class Python's is possessive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            oracle = re.compile(pattern, re.ASCII)
        except re.error:
            assume(False)
    texts = [*ASCII, "b]", "ab]", "-]]"]
    expected = [text for text in texts if oracle.fullmatch(text)]
    assert by_regex(pattern, texts) == expected
    others = [text for text in texts if text not in AMISS_IN_JSON]
    expected_others = [text for text in expected if text in others]
    if expected_others:  # else llguidance may find that nothing matches, and refuses it
        assert by_schema(pattern, others) == expected_others


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_a_pattern_that_is_readable_stays_as_it_is(pattern: str) -> None:
    readable = readable_regex(pattern)
    assert readable_regex(readable) == readable


@pytest.mark.parametrize("pattern", ["[", "[^", "[]", "[^]", "[a", r"[a\]", "a[z-a]", "a[b--]"])
def test_what_is_no_class_is_refused(pattern: str) -> None:
    for way in (by_regex, by_schema):
        with pytest.raises(ValueError, match="regex parse error"):
            way(pattern, ["a"])


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        ("a\\", True),
        ("\\", True),
        ("a\\\\\\", True),
        ("[a\\", True),
        ("[a]\n\\", True),
        ("a\\\\", False),
        ("[\\\\]", False),
        ("", False),
    ],
)
def test_a_pattern_does_not_end_within_an_escape(pattern: str, is_refused: bool) -> None:
    """llguidance would let it match anything."""
    refusal = pytest.raises(InvalidRequest, match="must not end with a single backslash")
    with refusal if is_refused else nullcontext():
        check_regex(pattern)
    with refusal if is_refused else nullcontext():
        readable_schema(json.dumps({"type": "string", "pattern": pattern}))


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        ("(?x)a\nb", True),
        ("a(?s-m:b)(?ix: c # d\r e)", True),
        ("(?x) a # b", False),
        ("(?x)a\tb", True),
        ("(?x)a\n", True),
        ("[\\d](?x)a b\t[c]", True),
        ("[\\]](?x)a\n[b]", True),
        ("[(?x)]\n", False),
        ("[](?x)]\n", False),
        ("[[](?x)\n", True),
        ("a\nb", False),
        (r"\(?x" + "\n", False),
        (r"(\d?x)" + "\n", False),
        ("([a]?x)\n", False),
        ("(?s-x)a\nb", False),
        ("(?<x>a)\n", False),
        (r"(?x)a\nb", False),
    ],
)
def test_a_regular_expression_with_the_flag_x_has_no_tabs_and_line_breaks(
    pattern: str, is_refused: bool
) -> None:
    """llguidance would take them for text, and what follows a comment for a part of it."""
    refusal = pytest.raises(InvalidRequest, match="no tabs and no line breaks")
    with refusal if is_refused else nullcontext():
        check_regex(pattern)


@pytest.mark.parametrize(
    "unit", ["[", "[]", "[a-", "\\", "(?", "(?a", "[\\x{", "\\x{", "[a]", "[^\\d-", "a"]
)
def test_a_long_pattern_takes_no_long_time(unit: str) -> None:
    pattern = unit * (131_072 // len(unit) - 1)
    begin = time.thread_time()
    for text in (f"{pattern}a", f"[{pattern}a]", f"(?{pattern}\n"):
        check_regex(text)
        readable_regex(text)
    assert time.thread_time() - begin < 2
