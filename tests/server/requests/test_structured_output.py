"""Formats of answers, and the grammars that they become."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from tests.server.openai.harness import both, sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMARS = [  # name, value, what the scheduler gets
    ("response_format", {"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ("guided_json", SCHEMA, Grammar("json_schema", json.dumps(SCHEMA))),
    ("guided_json", json.dumps(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA))),
    ("guided_regex", "[0-9]+", Grammar("regex", "[0-9]+")),
    ("guided_choice", ["yes", 'n"o'], Grammar("lark", 'start: "yes" | "n\\"o"')),
    ("guided_choice", ["\x7fz"], Grammar("lark", 'start: "\\u007fz"')),
    ("guided_grammar", 'start: "x"', Grammar("lark", 'start: "x"')),
    ("structured_outputs", {"json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    (
        "structured_outputs",
        {"json": json.dumps(SCHEMA), "regex": None, "json_object": False, "structural_tag": None},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ("structured_outputs", {"regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
    ("structured_outputs", {"choice": ["yes", "no"]}, Grammar("lark", 'start: "yes" | "no"')),
    ("structured_outputs", {"grammar": 'start: "x"'}, Grammar("lark", 'start: "x"')),
    ("structured_outputs", {"json_object": True}, Grammar("json_schema", '{"type": "object"}')),
    ("structured_outputs", {}, None),
    ("regex", "[0-9]+", Grammar("regex", "[0-9]+")),
    ("json_schema", json.dumps(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA))),
    ("json_schema", SCHEMA, Grammar("json_schema", json.dumps(SCHEMA))),
]
EBNF = """
root ::= animal " is " ("lazy" | [a-z]{2,3})? end-mark  # a comment
animal ::= "fox" | "dog"
end-mark ::= "\\u002e" | "\\u00e9" | "\\\\u0041"
"""
MATCHES = {
    "fox is lazy.": True,
    "dog is \u00e9": True,
    "fox is ab\\u0041": True,
    "cat is lazy.": False,
}


@both
@pytest.mark.parametrize(("name", "value", "grammar"), GRAMMARS)
def test_formats_become_grammars(kind: Any, name: str, value: Any, grammar: Grammar) -> None:
    assert sampling(kind, **{name: value}).grammar == grammar


@both
@pytest.mark.parametrize(
    "fields", [{"ebnf": EBNF}, {"guided_grammar": EBNF}, {"structured_outputs": {"grammar": EBNF}}]
)
@pytest.mark.parametrize("text", MATCHES)
def test_ebnf_is_translated_to_lark(kind: Any, fields: dict[str, Any], text: str) -> None:
    grammar = sampling(kind, **fields).grammar
    assert grammar.kind == "lark"
    source = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(LLTokenizer("byte"), source)
    ends = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
    assert ends == MATCHES[text]


@both
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "x"}},
            "structured_outputs.json and structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["x"]}, "guided_regex": "x"},
            "structured_outputs.choice and guided_regex",
        ),
        ({"regex": "x", "ebnf": EBNF}, "regex and ebnf"),
        (
            {"response_format": {"type": "json_object"}, "json_schema": "{}"},
            "response_format and json_schema",
        ),
    ],
)
def test_two_formats_are_both_named(kind: Any, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot follow both {names}") as refusal:
        sampling(kind, **fields)
    assert refusal.value.param == names.split(" and ")[1]


@both
def test_an_answer_follows_one_format_at_most(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="both response_format and guided_regex") as refusal:
        sampling(kind, response_format={"type": "json_object"}, guided_regex="x")
    assert refusal.value.param == "guided_regex"


@both
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("response_format", {"type": "json_schema"}, r"(?s)json_schema.*required"),
        ("response_format", {"type": "text", "json_schema": {"name": "x"}}, "not supported"),
        ("response_format", {"type": "json_object", "schema": {"type": "object"}}, "not supported"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "json_schema.name",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
            "pattern",
        ),
        ("response_format", {"type": "xml"}, "json_object"),
        ("guided_choice", [], "at least 1"),
        ("guided_grammar", "start: " + "a " * 8192, "16391 characters, which is more than 8192"),
        ("guided_regex", "\ud83d", "half a surrogate pair"),
        ("guided_regex", "(?x)a # b\nc", "flag x must have no tabs"),
        ("guided_json", {"minimum": math.inf}, "finite number|not JSON"),
        ("guided_json", json.dumps({"title": "x" * 300_000}), "at most 131072"),
        ("guided_json", "{'type': 'object'}", "not JSON"),
        ("guided_json", "null", "dictionary"),
        ("guided_json", '{"a": ' * 65 + "1" + "}" * 65, "more than 64 deep"),
        ("guided_json", "[" * 100_000, "not JSON"),
        ("structured_outputs", {"structural_tag": "{}"}, "not supported"),
        ("structured_outputs", {"whitespace_pattern": " "}, "not supported"),
        ("structured_outputs", {"disable_additional_properties": True}, "not supported"),
        ("structured_outputs", {"json": "no"}, "not JSON"),
        ("ebnf", 'start: "x"', "mistake: Expected ::="),
        ("ebnf", 'a ::= "x"', "No 'root' rule found"),
        ("ebnf", "root ::= b", "Rule 'b' not found"),
        ("ebnf", 'root ::= "\\', "in EBNF has a mistake"),
        ("ebnf", 'root ::= "\\ud83d"', "is no character"),
        ("ebnf", "root ::= " + "(" * 3000, "too deep|mistake"),
        ("ebnf", 'root ::= "' + "x" * 4096, "may have 4096 characters"),
        ("guided_grammar", 'root ::= "x', "mistake: Unexpected end"),
        ("guided_json", '{"minimum": 1e999}', "not JSON"),
    ],
)
def test_bad_formats_are_refused(kind: Any, name: str, value: Any, reason: str) -> None:
    with pytest.raises((ValidationError, InvalidRequest), match=reason):
        sampling(kind, **{name: value})
