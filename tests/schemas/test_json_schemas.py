"""What llguidance would refuse or misread in a JSON schema is written otherwise, or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl.errors import InvalidRequest
from minisgl.schemas.json_schemas import _IDLE, readable_schema

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
        {"propertyNames": {"format": "uuid", "minLength": 2}},
        {"propertyNames": {"minLength": True}},
        {"propertyNames": {"maxLength": -1}},
        {"propertyNames": {"maxLength": 3}, "properties": {"a": {}}},
        {"propertyNames": False},
        {"propertyNames": {"enum": ["a", 1]}},
        {"propertyNames": {"enum": ["a"], "pattern": "^a"}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}},
        {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}},
        {"propertyNames": {"$ref": "#/$defs/none"}},
        {"propertyNames": {"$ref": "#/$defs/none", "minLength": 2}, "$defs": {"none": {}}},
        {"propertyNames": {"$ref": "#/$defs/none"}, "$defs": []},
        {"propertyNames": {"$ref": "#/$defs/a", "minLength": 2}, "$defs": {"a": {"enum": ["x"]}}},
        {"propertyNames": {"enum": ["a"]}, "properties": []},
        {"propertyNames": {"enum": [str(number) for number in range(20_000)]}},
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
            {"$ref": "#/components/schemas/b", "components": {"schemas": {"b": BRACKET}}},
            lambda text: text,
        ),
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


@pytest.mark.parametrize("name", ["Größe", "地址", "a b", "List[Item]", "Page<Item>", "Page«Item»"])
@pytest.mark.parametrize("place", ["$defs", "definitions", "components"])
def test_names_of_definitions_may_have_any_character(place: str, name: str) -> None:
    """llguidance refuses references with characters that have to be encoded in a URI."""
    schema = {"type": "array", "items": {"$ref": f"#/{place}/{name}"}, place: {name: TEXT}}
    for text in (json.dumps(schema), json.dumps(schema, ensure_ascii=False)):
        source = LLMatcher.grammar_from_json_schema(readable_schema(text))
        assert LLMatcher(BYTES, source, log_level=0).get_error() == ""
    assert allows(schema, ["a"])
    assert not allows(schema, [1])


def test_what_is_no_reference_is_not_encoded() -> None:
    schema = {"properties": {"$ref": {"const": {"$ref": "a b"}}}, "$ref": "#/$defs/a%20b"}
    text = json.dumps({**schema, "default": {"$ref": "a b"}, "$defs": {"a b": {}}})
    assert json.loads(readable_schema(text)) == json.loads(text)


def test_a_keyword_may_be_written_with_escaped_letters() -> None:
    text = r'{"p\u0061ttern": "^[[]$"}'
    assert json.loads(readable_schema(text)) == {"pattern": r"^[\[]$"}


def test_regular_expressions_of_names_that_become_equal_are_refused() -> None:
    """None is left out. llguidance refuses others that match the same names."""
    schema = {"patternProperties": {"^[&]$": {"type": "null"}, r"^[\&]$": {"type": "number"}}}
    with pytest.raises(InvalidRequest, match="are equal") as caught:
        readable_schema(json.dumps(schema))
    assert caught.value.param == "grammar"


COLORS = {"enum": ["red", "green"], "title": "Color", "type": "string"}
NUMBER = {"type": "number"}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (
            {"propertyNames": COLORS, "additionalProperties": NUMBER},
            [{}, {"red": 1}, {"red": 1, "green": 2}],
            [{"blue": 1}, {"red": "a"}, {"red": 1, "blue": 1}],
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": NUMBER},
            [{}, {"green": 1}],
            [{"blue": 1}, {"green": "a"}],
        ),
        ({"propertyNames": {"const": "red"}}, [{}, {"red": [{}]}], [{"green": 1}]),
        ({"propertyNames": {"enum": []}}, [{}], [{"red": 1}]),
        (
            {"propertyNames": COLORS, "properties": {"green": TEXT, "blue": TEXT}},
            [{}, {"green": "a", "red": 1}],
            [{"green": 1}, {"blue": "a"}],
        ),
        (
            {
                "propertyNames": COLORS,
                "properties": {"red": TEXT, "blue": TEXT},
                "additionalProperties": False,
            },
            [{}, {"red": "a"}],
            [{"green": "a"}, {"blue": "a"}, {"red": 1}],
        ),
        (
            {"propertyNames": COLORS, "additionalProperties": NUMBER, "required": ["green"]},
            [{"green": 1}, {"red": 1, "green": 1}],
            [{}, {"red": 1}],
        ),
        (
            {
                "propertyNames": {"type": "string", "pattern": "^[[a]b?$"},
                "additionalProperties": NUMBER,
            },
            [{}, {"[": 1}, {"ab": 1, "a": 2}],
            [{"b": 1}, {"a": "a"}, {"abb": 1}],
        ),
        ({"propertyNames": {"pattern": "^a$"}}, [{}, {"a": "b"}], [{"b": 1}]),
        (
            {"propertyNames": {"minLength": 1, "maxLength": 2, "type": "string"}},
            [{}, {"a": "b"}, {'\n"': 1}, {"a\\": 1}],
            [{"": 1}, {"abc": 1}],
        ),
        (
            {"propertyNames": {"minLength": 2}, "additionalProperties": NUMBER},
            [{"ab": 1}, {"abc" * 9: 2}],
            [{"a": 1}, {"": 1}, {"ab": "a"}],
        ),
        ({"propertyNames": {"maxLength": 1}}, [{"": 1}, {"a": 1}], [{"ab": 1}]),
        ({"propertyNames": {"maxLength": 1.0}}, [{"": 1}, {"a": 1}], [{"ab": 1}]),
        ({"propertyNames": {"maxLength": 0}}, [{}, {"": 1}], [{"a": 1}]),
        ({"propertyNames": {"minLength": 2, "maxLength": 1}}, [{}], [{"": 1}, {"a": 1}]),
        (
            {
                "propertyNames": COLORS,
                "additionalProperties": {
                    "type": "object",
                    "propertyNames": {"const": "a"},
                    "additionalProperties": BRACKET,
                },
            },
            [{"red": {"a": "["}}],
            [{"red": {"b": "["}}, {"red": {"a": "b"}}, {"a": {"a": "["}}],
        ),
    ],
)
def test_names_of_properties_may_be_restricted(
    schema: dict[str, Any], allowed: list[Any], forbidden: list[Any]
) -> None:
    record = {"type": "object", **schema}
    definitions = {"Color": COLORS, "record": record}
    places: list[tuple[Any, Callable[[Any], Any]]] = [
        (record, lambda value: value),
        ({"anyOf": [{"type": "null"}, record]}, lambda value: value),
        ({"type": "array", "items": record}, lambda value: [value]),
        ({"properties": {"a": {"$ref": "#/$defs/record"}}}, lambda value: {"a": value}),
    ]
    for place, wrap in places:
        whole = {**place, "$defs": definitions}
        assert [value for value in allowed if not allows(whole, wrap(value))] == []
        assert [value for value in forbidden if allows(whole, wrap(value))] == []


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "whole", "allowed", "forbidden"),
    [
        (
            {"properties": {"a": INTEGER}, "patternProperties": {"^a$": NUMBER}},
            {"a": 1},
            [{}],
            [{"a": 0.5}, {"a": "a"}, {"b": 1}],
        ),
        (
            {"patternProperties": {"^(a|b-c)$": NUMBER}, "required": ["b-c", "a"]},
            {"b-c": 1, "a": 0.5},
            [],
            [{"a": 1}, {"b-c": 1, "a": "a"}],
        ),
        (
            {
                "properties": {"b": TEXT},
                "patternProperties": {"^(?:a|b)$": {}, "^c d$": NUMBER},
                "required": ["c d", "a"],
            },
            {"b": "b", "c d": 1, "a": []},
            [{"c d": 1, "a": "b"}],
            [{"c d": "b", "a": 1}, {"a": 1}, {"b": 1, "c d": 1, "a": 1}],
        ),
        (
            {
                "propertyNames": {"pattern": "^(a|b)$"},
                "required": ["b", "a"],
                "additionalProperties": NUMBER,
            },
            {"b": 1, "a": 2},
            [],
            [{}, {"b": 1}, {"b": 1, "a": "a"}],
        ),
        (
            {"patternProperties": {"^[ab]$": NUMBER}, "required": ["a", "b"]},
            {"a": 1, "b": 0.5},
            [],
            [{"a": 1}, {"a": 1, "b": "b"}],
        ),
        (
            {"patternProperties": {"^x[1-2]$": NUMBER, "^b?a$": TEXT}}
            | {"properties": {"a": {}, "ba": {}, "x1": {}, "x2": {}}},
            {"a": "a", "ba": "b", "x1": 1, "x2": 2},
            [{}, {"x2": 2}],
            [{"a": 1}, {"x2": "a"}, {"x3": 1}],
        ),
        (
            {"properties": {"b": NUMBER, "a": False}, "patternProperties": {"^a$": NUMBER}},
            {"b": 1},
            [{}],
            [{"a": 1}],
        ),
    ],
)
def test_patterns_of_listed_names_promise_no_other_name(
    schema: dict[str, Any],
    whole: dict[str, Any],
    allowed: list[dict[str, Any]],
    forbidden: list[dict[str, Any]],
) -> None:
    """A comma was allowed behind the last name, and then nothing but blanks."""
    schema = {"type": "object", "additionalProperties": False, **schema}
    assert [value for value in [*allowed, *forbidden] if allows(schema, value)] == allowed
    assert allows(schema, whole)
    begun = BYTES.tokenize_bytes(json.dumps(whole, ensure_ascii=False).encode()[:-1])
    comma = BYTES.tokenize_bytes(b",")
    assert _matcher(schema).validate_tokens([*begun, *comma]) == len(begun)


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^(a|b)$": NUMBER}, "required": ["a"]},
        {"patternProperties": {"^a|b$": NUMBER}, "required": ["a", "b"]},
        {"patternProperties": {"^a": NUMBER}, "properties": {"a": NUMBER}},
        {"patternProperties": {"^a$": NUMBER}, "properties": 5},
        {"patternProperties": 5, "properties": {"a": NUMBER}},
    ],
    ids=str,
)
def test_other_patterns_of_names_stay(schema: dict[str, Any]) -> None:
    assert json.loads(readable_schema(json.dumps(schema))) == schema


def test_what_is_written_for_listed_names_of_nested_objects_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"patternProperties": {"^(a|b)$": schema}, "required": ["a", "b"]}
    assert len(readable_schema(json.dumps(schema))) < 4 * 2**17


def test_names_that_no_restriction_allows_cannot_be_required() -> None:
    schema = {"type": "object", "propertyNames": COLORS, "required": ["blue"]}
    assert "required property 'blue' is unsatisfiable" in refusal(schema)


def test_properties_keep_their_order() -> None:
    schema = {
        "propertyNames": COLORS,
        "properties": {"green": TEXT},
        "additionalProperties": NUMBER,
    }
    assert json.loads(readable_schema(json.dumps(schema))) == {
        "properties": {"green": TEXT, "red": NUMBER},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "names",
    [
        {"enum": [str(number) for number in range(10_000)]},
        {"const": "a" * 60_000},
        {"pattern": "[a]" * 20_000},
    ],
    ids=["many", "long", "pattern"],
)
def test_what_is_written_for_names_is_bounded(names: dict[str, Any]) -> None:
    record = {"type": "object", "propertyNames": {"$ref": "#/$defs/names"}}
    text = json.dumps({"prefixItems": [record] * 800, "$defs": {"names": names}})
    begin = time.thread_time()
    assert len(readable_schema(text)) < 4 * 2**17
    assert time.thread_time() - begin < 2


def test_what_is_written_for_names_of_nested_records_is_bounded() -> None:
    record: dict[str, Any] = {"type": "object", "propertyNames": {"enum": ["a", "b"]}}
    for _ in range(60):
        record = {**record, "additionalProperties": record}
    assert len(readable_schema(json.dumps(record))) < 2 * 2**17


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["a", "ab"], ["", "abc"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
        (
            {"type": "object", "minProperties": 1.0, "maxProperties": 2.0},
            [{"a": 1}, {"a": 1, "b": 2}],
            [{}, {"a": 1, "b": 2, "c": 3}],
        ),
        ({"type": "integer", "minimum": 1.0, "maximum": 9.0, "multipleOf": 2.0}, [2, 8], [0, 3]),
    ],
)
def test_integers_may_be_written_as_floats(
    schema: dict[str, Any], allowed: list[Any], forbidden: list[Any]
) -> None:
    assert [value for value in [*allowed, *forbidden] if allows(schema, value)] == allowed


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": -(2**63) + 1},
        {"exclusiveMinimum": -(2**63)},
        {"minimum": -1e19, "maximum": 1e19},
    ],
    ids=str,
)
@pytest.mark.parametrize("types", ["integer", ["integer", "null"]])
def test_a_lower_bound_may_be_the_least_integer(bounds: dict[str, Any], types: Any) -> None:
    schema = {"type": types, **bounds}
    assert all(allows(schema, value) for value in (0, -5, 10**18, -(10**18), 2**63 - 1))
    assert not allows(schema, -(2**64))


@pytest.mark.parametrize("size", [1.5, "1", True, -1.0], ids=str)
def test_what_is_no_count_is_still_refused(size: Any) -> None:
    assert "Expected positive integer" in refusal({"type": "string", "maxLength": size})


INTEGERS = {"additionalProperties": {"type": "integer"}}
CLOSED = {"additionalProperties": False}
A_AND_B = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"type": "object", "minProperties": 2, **INTEGERS}, 1),
        ({"minProperties": 2}, 1),
        ({"type": ["null", "object"], "minProperties": 2.0}, 1),
        ({"type": "object", "minProperties": 3, "required": ["a", "a"], **INTEGERS}, 2),
        ({"type": "object", "minProperties": 4, **A_AND_B}, 3),
        ({"minProperties": 2, "patternProperties": {"^a+$": {}}, **CLOSED}, 1),
        ({"minProperties": 2, "propertyNames": {"pattern": "^a+$"}}, 1),
        ({"minProperties": 2, "allOf": [{**A_AND_B, **CLOSED}]}, 1),
    ],
    ids=str,
)
def test_more_properties_than_a_grammar_can_tell_apart_are_refused(
    schema: dict[str, Any], most: int
) -> None:
    """A name might be repeated to reach their number, and count once where the answer is read."""
    for place in (schema, {"anyOf": [{"type": "array", "items": schema}]}):
        with pytest.raises(InvalidRequest) as caught:
            readable_schema(json.dumps(place))
        number = int(schema["minProperties"])
        assert str(caught.value).startswith(f"minProperties is {number}, it may be {most}:")
        assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"minProperties": 1, **INTEGERS}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
        ({"minProperties": 2, "required": ["a"], **INTEGERS}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"minProperties": 3, **A_AND_B}, [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "b": 2}]),
        ({"minProperties": 2, **A_AND_B, **CLOSED}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"minProperties": 3, "type": "array"}, [[]], [{}]),
        (
            {"minProperties": 2, "enum": [{"a": 1}, {"a": 1, "b": 2}]},
            [{"a": 1, "b": 2}],
            [{"a": 1}, {"a": 1, "c": 2}],
        ),
        ({"minProperties": 2, "const": {"a": 1, "b": 2}}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ],
    ids=str,
)
def test_fewer_properties_are_counted(
    schema: dict[str, Any], allowed: list[Any], forbidden: list[Any]
) -> None:
    schema = {"type": "object", **schema}
    assert [value for value in [*allowed, *forbidden] if allows(schema, value)] == allowed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5, "minProperties": 2, "minimum": 0},
        {"required": 5, "minProperties": 1},
        {"required": [["a"]], "minProperties": 1},
        {"type": [["a"]], "minProperties": 2, "minimum": 0},
    ],
    ids=str,
)
def test_mistakes_beside_bounds_are_left_to_their_reader(schema: dict[str, Any]) -> None:
    assert json.loads(readable_schema(json.dumps(schema))) == schema
    assert refusal(schema) != ""


def test_what_the_documentation_says_of_names_that_come_twice() -> None:
    """llguidance compares names as they are written."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text, is_allowed in (
        ('{"a": 1, "a": 2}', False),
        (r'{"a": 1, "\u0061": "x"}', True),
        ('{"b": 1, "b": 2}', True),
    ):
        tokens = BYTES.tokenize_bytes(text.encode())
        assert (_matcher(schema).validate_tokens(tokens) == len(tokens)) == is_allowed
        closed = _matcher({**schema, "additionalProperties": False})
        assert closed.validate_tokens(tokens) < len(tokens)
