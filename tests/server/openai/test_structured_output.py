"""Formats of answers, and the grammars that they become."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from tests.server.openai.harness import both, sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMARS = [  # name, value, what the scheduler gets
    ("response_format", {"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ("guided_json", SCHEMA, Grammar("json_schema", json.dumps(SCHEMA))),
    ("guided_json", json.dumps(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA))),
    ("guided_regex", "[0-9]+", Grammar("regex", "[0-9]+")),
    ("guided_choice", ["yes", 'n"o'], Grammar("lark", 'start: "yes" | "n\\"o"')),
    ("guided_grammar", 'start: "x"', Grammar("lark", 'start: "x"')),
]


@both
@pytest.mark.parametrize(("name", "value", "grammar"), GRAMMARS)
def test_formats_become_grammars(kind: Any, name: str, value: Any, grammar: Grammar) -> None:
    assert sampling(kind, **{name: value}).grammar == grammar


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
        ("guided_json", {"minimum": math.inf}, "finite number|not JSON"),
        ("guided_json", json.dumps({"title": "x" * 300_000}), "at most 131072"),
        ("guided_json", "{'type': 'object'}", "not JSON"),
        ("guided_json", "null", "dictionary"),
        ("guided_json", '{"a": ' * 65 + "1" + "}" * 65, "more than 64 deep"),
        ("guided_json", "[" * 100_000, "not JSON"),
        ("guided_json", '{"minimum": 1e999}', "not JSON"),
    ],
)
def test_bad_formats_are_refused(kind: Any, name: str, value: Any, reason: str) -> None:
    with pytest.raises((ValidationError, InvalidRequest), match=reason):
        sampling(kind, **{name: value})
