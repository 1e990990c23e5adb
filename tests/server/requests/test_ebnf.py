"""Grammars in EBNF match what they match in llama.cpp, whatever names and escapes they have."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl.server.requests.ebnf import MAX_EBNF, ebnf_to_lark

BYTES = LLTokenizer("byte")


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(ebnf_to_lark(grammar)), log_level=0)
    assert matcher.get_error() == ""
    tokens = list(text.encode())
    is_begun: bool = matcher.validate_tokens(tokens) == len(tokens)
    return is_begun and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("start", "begin"),
        ("x-1", "x_1"),
        ("X", "x"),
        ("Root", "ROOT"),
        ("fooBar", "foo-bar"),
        ("r1", "r1-r1"),
        ("1a", "2"),
        ("-a", "_a"),
    ],
)
@pytest.mark.parametrize("bodies", [('"a"', '"b"'), ('"a" | "c" root', '"b" | "d" root')], ids=str)
def test_rules_may_have_names_that_lark_does_not_tell_apart(
    first: str, second: str, bodies: tuple[str, str]
) -> None:
    grammar = f"root ::= {first} {second}\n{first} ::= {bodies[0]}\n{second}::={bodies[1]}"
    assert matches(grammar, "ab")
    assert not matches(grammar, "ba")
    assert not matches(grammar, "aa")


@pytest.mark.parametrize(
    ("grammar", "text", "other"),
    [
        (r'root ::= "\[a\]"', "[a]", r"\[a\]"),
        (r'root ::= "\\[\\\]"', r"\[\]", "[]"),
        (r'root ::= "\"\[\""', '"["', "["),
        (r'root ::= "[x-1]" x-1' + '\nx-1 ::= "a" # "x-1', "[x-1]a", "aa"),
        (r"root ::= [\[\]x\\]+", r"[]x\[", "a"),
        ('root ::= "a\x7fb"', "a\x7fb", "ab"),
        ('root ::= "a\tb\nc"', "a\tb\nc", "a b c"),
        ("root ::= [\x7f]", "\x7f", "a"),
        (r'root ::= "\u007f\x7f\U0000007f"', "\x7f\x7f\x7f", "\x7f"),
        (r'root ::= "\u005b\xe9"', "[\u00e9", "["),
        ("root ::= [a&&b~~]+", "ab&~", "c"),
        ('root ::= "a" . "b"', "a\nb", "ab"),
        ('root ::= "." "{0}"', ".{0}", "."),
        ('root ::= x"1"y[2]x{2}y # z\nx::="a"\ny::="b"', "a1b2aab", "a1b2ab"),
    ],
)
def test_literals_and_classes_are_read_as_llama_cpp_reads_them(
    grammar: str, text: str, other: str
) -> None:
    assert matches(grammar, text)
    assert not matches(grammar, other)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" "b"{0}',
        'root ::= "b"{ 0 , 0 } "a"',
        'root ::= [b]{0} "a"',
        'root ::= "a" .{0}',
        'root ::= "a" x-1 {0}\nx-1 ::= "b"',
        'root ::= "a" ("b" ("c" | "d")){0} ("e" | "f" # )\n) {0,0}',
        'root ::= "a" "b"+{0}',
        'root ::= ("b"{0} | "a"){1}',
    ],
)
def test_what_may_be_repeated_zero_times_is_left_out(grammar: str) -> None:
    assert matches(grammar, "a")
    assert not matches(grammar, "ab")


def test_an_undefined_rule_is_named_though_it_is_left_out() -> None:
    with pytest.raises(ValueError, match="a mistake: Rule 'b-1' not found"):
        ebnf_to_lark('root ::= "a" b-1{0}')


@pytest.mark.parametrize(
    "grammar",
    ["root ::= {0}", 'root ::= ) {0}\na ::= "', 'root ::= "a" [b', "root ::= a", 'a ::= "root"'],
)
def test_mistakes_are_still_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="in EBNF has a mistake"):
        ebnf_to_lark(grammar)


def test_the_longest_grammar_is_translated() -> None:
    grammar = "root ::= " + "a " * ((MAX_EBNF - 20) // 2) + '\na ::= "a"'
    assert matches(grammar, "a" * ((MAX_EBNF - 20) // 2))
