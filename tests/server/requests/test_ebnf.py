"""Grammars in EBNF match what they match in llama.cpp, whatever names and escapes they have."""

from __future__ import annotations

import random

import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl.server.requests.ebnf import MAX_EBNF, ebnf_to_lark

BYTES = LLTokenizer("byte")
ASCII = [chr(number) for number in range(128)]


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(ebnf_to_lark(grammar)), log_level=0)
    assert matcher.get_error() == ""
    tokens = list(text.encode())
    is_begun: bool = matcher.validate_tokens(tokens) == len(tokens)
    return is_begun and matcher.consume_tokens(tokens) and matcher.is_accepting()


def allowed_by_class(inside: str) -> set[str]:
    """The characters of ASCII that a class allows."""
    lark = ebnf_to_lark(f"root ::= [{inside}]")
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert matcher.get_error() == ""
    return {character for character in ASCII if matcher.validate_tokens([ord(character)]) == 1}


def allowed_in_llama_cpp(parts: list[str]) -> set[str] | None:
    """As its parser reads characters of a class; None if a range ends before its begin."""
    allowed: set[str] = set()
    left = [{r"\x2d": "-"}.get(part, part[-1]) for part in parts]
    is_escaped = [part.startswith("\\") for part in parts]
    index = 0
    while index < len(left):
        first = last = left[index]
        index += 1
        if left[index : index + 1] == ["-"] and not is_escaped[index] and index + 1 < len(left):
            last = left[index + 1]
            index += 2
        if last < first:
            return None
        allowed.update(chr(number) for number in range(ord(first), ord(last) + 1))
    return allowed


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
    ("inside", "allowed"),
    [
        ("+--", "+,-"),
        ("--/", "-./"),
        ("---", "-"),
        ("a-b-d", "ab-d"),
        ("a-", "a-"),
        ("-a", "-a"),
        ("--", "-"),
        (r"\x2b-\u002d", "+,-"),
        (r"\[-\]", "[\\]"),
        ("&-(", "&'("),
    ],
)
def test_a_hyphen_in_a_class_is_a_range_or_itself(inside: str, allowed: str) -> None:
    assert allowed_by_class(inside) == set(allowed)
    assert allowed_by_class("^" + inside) == set(ASCII) - set(allowed)


def test_classes_allow_what_they_allow_in_llama_cpp() -> None:
    choices = random.Random(0)
    atoms = ["-", "-", "-", "+", "a", "z", "&", "~", "^", "/", "[", "\n", r"\]", r"\\", r"\x2d"]
    for _ in range(100):
        parts = choices.choices(atoms, k=choices.randint(1, 7))
        allowed = allowed_in_llama_cpp(parts)
        if allowed is not None and parts[0] != "^":
            assert allowed_by_class("".join(parts)) == allowed, parts


def test_a_range_whose_end_is_before_its_begin_is_refused() -> None:
    """In llama.cpp it allows nothing."""
    grammar = LLMatcher.grammar_from_lark(ebnf_to_lark("root ::= [a--]"))
    assert "invalid character class range" in LLMatcher(BYTES, grammar, log_level=0).get_error()


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
    [
        "root ::= {0}",
        'root ::= ) {0}\na ::= "',
        'root ::= "a" [b',
        "root ::= a",
        'a ::= "root"',
        r"root ::= [\&]",
        r"root ::= [a\~]",
        r"root ::= [+\-a]",
        r"root ::= [\x-2]",
        'root ::= "a\\\n"',
        r'root ::= "abc\"',
    ],
)
def test_mistakes_are_still_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="in EBNF has a mistake"):
        ebnf_to_lark(grammar)


def test_the_longest_grammar_is_translated() -> None:
    grammar = "root ::= " + "a " * ((MAX_EBNF - 20) // 2) + '\na ::= "a"'
    assert matches(grammar, "a" * ((MAX_EBNF - 20) // 2))


ARITHMETIC = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('root ::= "x" num "\\n"\nnum ::= [0-9] ws\nws ::= [ \\n]*', ["x7\n", "x7 \n\n"], ["x\n"]),
        ('root ::= num "0"\nnum ::= [0-9]+', ["10", "100"], ["1"]),
        ('root ::= ("b" | a) "c"\na ::= [a-z] [a-z]', ["bc", "abc"], ["ac"]),
        ('root ::= [a-z]+ x?\nx ::= "ab" "c"', ["zab", "zabc"], ["1"]),
        ('root ::= "ab" "c" | "a" "bd"', ["abc", "abd"], ["abcd"]),
        (ARITHMETIC, ["a=1\n", "a+2*(b)=3\n", "a = 1 \n\nb=2\n"], ["a=", "=1\n"]),
    ],
)
def test_what_follows_gets_the_characters_that_it_needs(
    grammar: str, allowed: list[str], refused: list[str]
) -> None:
    assert all(matches(grammar, text) for text in allowed)
    assert not any(matches(grammar, text) for text in refused)


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('root ::= ("a"+)?', ["", "aa"], ["b"]),
        ('root ::= ([0-9]+)? "x"', ["x", "12x"], ["1"]),
        ('root ::= (("a" "b")*)?', ["", "abab"], ["a"]),
        ('root ::= ("ab"+)*', ["", "abab"], ["aba"]),
        ('root ::= ("a"{2}){2}', ["aaaa"], ["aaa"]),
        ('root ::= ("a"?)*', ["", "aaa"], ["b"]),
        ('root ::= (x+)? "z"\nx ::= "q"', ["z", "qqz"], ["q"]),
        ('root ::= ("a"{0,3})?', ["", "aaa"], ["aaaa"]),
        ('root ::= (("a"+))? "/" r # "\nr ::= "R1_R"', ["aa/R1_R", "/R1_R"], ["a"]),
    ],
)
def test_a_group_may_be_repeated_and_so_may_what_is_in_it(
    grammar: str, allowed: list[str], refused: list[str]
) -> None:
    assert all(matches(grammar, text) for text in allowed)
    assert not any(matches(grammar, text) for text in refused)
