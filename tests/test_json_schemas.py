"""What llguidance would refuse or misread in a JSON schema is written otherwise, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl.errors import InvalidRequest
from minisgl.json_schemas import _IDLE, readable_schema

RECORD = {"type": "object", "additionalProperties": {"type": "number"}}


BYTES = LLTokenizer("byte")


def refusal(schema: Any) -> str:
    """Why llguidance refuses a schema; empty if it does not."""
    error: str = _matcher(schema).get_error()
    return error


def allows(schema: Any, value: Any) -> bool:
    """Whether an answer may be a value."""
    matcher = _matcher(schema)
    assert matcher.get_error() == ""
    tokens = BYTES.tokenize_bytes(json.dumps(value).encode())
    is_begun: bool = matcher.validate_tokens(tokens) == len(tokens)
    return is_begun and matcher.consume_tokens(tokens) and matcher.is_accepting()


def _matcher(schema: Any) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema(readable_schema(json.dumps(schema)))
    return LLMatcher(BYTES, source, log_level=0)


@pytest.mark.parametrize(("keyword", "value"), _IDLE, ids=str)
def test_what_changes_nothing_is_left_out(keyword: str, value: Any) -> None:
    idle = {"type": "string", keyword: value}
    places = [
        {**RECORD, keyword: value},
        {"type": "object", "properties": {"a": idle}, "additionalProperties": idle},
        {"type": "array", "items": idle},
        {"anyOf": [idle, {"$ref": "#/$defs/b"}], "$defs": {"b": idle}},
    ]
    for schema in places:
        assert refusal(schema) == ""
        assert json.loads(readable_schema(json.dumps(schema))) != schema


@pytest.mark.parametrize(
    "restriction",
    [
        {"uniqueItems": True},
        {"uniqueItems": 0},
        {"propertyNames": {"type": "string", "pattern": "^a"}},
        {"unevaluatedProperties": False},
        {"dependentRequired": {"a": ["b"]}},
    ],
    ids=str,
)
def test_what_restricts_an_answer_is_still_refused(restriction: dict[str, Any]) -> None:
    assert next(iter(restriction)) in refusal({**RECORD, **restriction})


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"type": "object", "properties": {"uniqueItems": False, "format": {"type": "string"}}}
    assert json.loads(readable_schema(json.dumps(schema))) == schema


@pytest.mark.parametrize("text", ['{"format": "password"', '"format"', '["format"]', "format"])
def test_what_is_no_schema_is_left_to_its_reader(text: str) -> None:
    assert readable_schema(text) == text


def test_what_has_no_such_keyword_is_not_read() -> None:
    text = '{"type":  "string"}'
    assert readable_schema(text) is text


def test_a_schema_that_is_too_deep_is_left_to_its_reader() -> None:
    text = '{"format": "password", "items": ' + '{"items": ' * 10**5 + "true" + "}" * (10**5 + 1)
    assert readable_schema(text) == text


MISREAD = "(?x)^a #c\nb$"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": MISREAD},
        {"type": "object", "patternProperties": {MISREAD: {}}},
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "string", "pattern": MISREAD}]}},
        },
    ],
    ids=str,
)
def test_a_regular_expression_that_would_be_misread_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="no tabs and no line breaks"):
        readable_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?i)^a\n$"},
        {"type": "object", "properties": {"pattern": {"type": "string", "description": MISREAD}}},
        {"type": "string", "pattern": 5, "patternProperties": MISREAD},
        {"enum": [{"pattern": "[[]"}], "const": {"pattern": "[[]"}, "default": {"pattern": "[[]"}},
    ],
    ids=str,
)
def test_other_texts_are_left_as_they_are(schema: dict[str, Any]) -> None:
    assert json.loads(readable_schema(json.dumps(schema))) == schema


BRACKET = {"type": "string", "pattern": "^[[&&a]$"}


@pytest.mark.parametrize(
    ("schema", "wrap"),
    [
        (BRACKET, lambda text: text),
        ({"type": "object", "properties": {"a": BRACKET}}, lambda text: {"a": text}),
        ({"type": "object", "additionalProperties": BRACKET}, lambda text: {"a": text}),
        ({"type": "array", "items": [{}], "additionalItems": BRACKET}, lambda text: [1, text]),
        ({"type": "array", "prefixItems": [BRACKET]}, lambda text: [text]),
        ({"anyOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": BRACKET}}, lambda text: text),
        (
            {"patternProperties": {"^[[&&a]$": {"type": "null"}}, "additionalProperties": False},
            lambda text: {text: None},
        ),
    ],
)
def test_character_classes_are_read_as_json_schema_reads_them(
    schema: dict[str, Any], wrap: Callable[[str], Any]
) -> None:
    assert [text for text in "[&ab" if allows(schema, wrap(text))] == ["[", "&", "a"]


def test_a_keyword_may_be_written_with_escaped_letters() -> None:
    text = r'{"p\u0061ttern": "^[[]$"}'
    assert json.loads(readable_schema(text)) == {"pattern": r"^[\[]$"}


def test_regular_expressions_of_names_that_become_equal_are_refused() -> None:
    """None is left out. llguidance refuses others that match the same names."""
    schema = {"patternProperties": {"^[&]$": {"type": "null"}, r"^[\&]$": {"type": "number"}}}
    with pytest.raises(InvalidRequest, match="are equal") as caught:
        readable_schema(json.dumps(schema))
    assert caught.value.param == "grammar"
