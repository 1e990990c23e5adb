"""Objects of schemas are closed, unless they say otherwise or closing would break them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import llguidance
import llguidance.hf
import pytest

from minisgl.server.openai.chat import ChatRequest
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.requests.closed_schemas import close_objects
from tests.checkpoints import tiny_tokenizer
from tests.server.openai.harness import read, sampling

TOKENIZER = tiny_tokenizer()
VOCABULARY = llguidance.hf.from_tokenizer(TOKENIZER)
INTEGER = {"type": "integer"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def allows(schema: Any, value: Any) -> bool:
    """Whether llguidance lets a model write a value."""
    spec = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(VOCABULARY, spec, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    ids = TOKENIZER.encode(json.dumps(value), add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


A = {"a": 1}
B = {"b": 1}
A_MORE = {"a": 1, "x": 1}
PAIR = {"a": {"b": 1}}
PAIR_MORE = {"a": {"b": 1, "x": 1}}
CLOSED = {  # schema, a value that it has, a value that it had before
    "an object": (obj(a=INTEGER), A, A_MORE),
    "without a type": ({"properties": {"a": INTEGER}}, A, A_MORE),
    "or null": ({**obj(a=INTEGER), "type": ["object", "null"]}, None, A_MORE),
    "in an object": (obj(a=obj(b=INTEGER)), PAIR, PAIR_MORE),
    "in a list": ({"type": "array", "items": obj(a=INTEGER)}, [A], [A_MORE]),
    "in a tuple": ({"type": "array", "prefixItems": [obj(a=INTEGER)]}, [A], [A_MORE]),
    "as other values": ({"additionalProperties": obj(b=INTEGER)}, PAIR, PAIR_MORE),
    "of a pattern": ({"patternProperties": {"^a": obj(b=INTEGER)}}, PAIR, PAIR_MORE),
    "one of two": ({"anyOf": [obj(a=INTEGER), {"type": "null"}]}, A, A_MORE),
    "one of two with a type": (
        {"type": "object", "anyOf": [obj(a=INTEGER), obj(b=INTEGER)]},
        B,
        {"b": 1, "x": 1},
    ),
    "referred to": (
        {**obj(a={"$ref": "#/$defs/B"}), "$defs": {"B": obj(b=INTEGER)}},
        PAIR,
        PAIR_MORE,
    ),
    "in itself": (obj(a={"$ref": "#"}), {"a": {"a": {}}}, {"a": {"a": {"b": {}}}}),
    "elsewhere": (
        {**obj(a={"$ref": "#/components/A"}), "components": {"A": obj(b=INTEGER)}},
        PAIR,
        PAIR_MORE,
    ),
    "all of one": (obj(a={"allOf": [obj(b=INTEGER)], "title": "A"}), PAIR, PAIR_MORE),
}


@pytest.mark.parametrize(("schema", "value", "other"), CLOSED.values(), ids=CLOSED)
def test_objects_are_closed_wherever_they_are(schema: Any, value: Any, other: Any) -> None:
    before = deepcopy(schema)
    closed = close_objects(schema, free_form=False)
    assert schema == before
    assert allows(schema, value)
    assert allows(closed, value)
    assert allows(schema, other)
    assert not allows(closed, other)


def test_what_must_not_be_stays_as_it_is() -> None:
    """Closed, it would match less, and so the whole schema more."""
    forbidden = {"not": obj(a=INTEGER)}
    closed = close_objects(obj(x=forbidden), free_form=True)
    assert closed["properties"] == {"x": forbidden}


BOTH = {"a": 1, "b": 1}
NAMED_FOO = {**obj(a=INTEGER), "$anchor": "foo"}
AT_A_B_C = {**obj(a=INTEGER), "$id": "http://a.b/c"}
LEFT_OPEN = {
    "said so": ({**obj(a=INTEGER), "additionalProperties": True}, A_MORE),
    "said of others": ({**obj(a=INTEGER), "additionalProperties": INTEGER}, A_MORE),
    "all of two": ({"allOf": [obj(a=INTEGER), obj(b=INTEGER)]}, BOTH),
    "all of one and more": ({**obj(a=INTEGER), "allOf": [obj(b=INTEGER)]}, BOTH),
    "a part beside": ({**obj(a=INTEGER), "anyOf": [obj(b=INTEGER)]}, BOTH),
    "a reference beside": (
        {**obj(a=INTEGER), "$ref": "#/$defs/B", "$defs": {"B": obj(b=INTEGER)}},
        BOTH,
    ),
    "parts that are referred to": (
        {
            "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/of~1b"}],
            "$defs": {
                "A": obj(a=INTEGER),
                "of/b": {"anyOf": [{"$ref": "#/$defs/list/anyOf/0"}]},
                "list": {"anyOf": [obj(b=INTEGER)]},
            },
        },
        BOTH,
    ),
    "a part that has a name": (
        {**obj(x={"allOf": [{"$ref": "#foo"}, obj(b=INTEGER)]}), "$defs": {"A": NAMED_FOO}},
        {"x": BOTH},
    ),
    "a part that has an address": (
        {**obj(x={"allOf": [{"$ref": "http://a.b/c"}, obj(b=INTEGER)]}), "$defs": {"A": AT_A_B_C}},
        {"x": BOTH},
    ),
    "a part at a relative address": (
        {
            **obj(x={"allOf": [{"$ref": "c#/$defs/A"}, obj(b=INTEGER)]}),
            "$id": "http://a.b/c",
            "$defs": {"A": obj(a=INTEGER)},
        },
        {"x": BOTH},
    ),
    "one needs what is not listed": ({**obj(a=INTEGER), "required": ["b"]}, BOTH),
    "of any form": (obj(a={"type": "object"}), {"a": {"x": 1}}),
}


@pytest.mark.parametrize(("schema", "value"), LEFT_OPEN.values(), ids=LEFT_OPEN)
def test_an_object_stays_open_where_it_says_so_or_closing_would_break_it(
    schema: Any, value: Any
) -> None:
    assert allows(schema, value)
    assert allows(close_objects(schema, free_form=False), value)


def test_an_object_of_free_form_is_closed_on_demand_and_at_the_root() -> None:
    schema = obj(a={"type": "object"})
    assert not allows(close_objects(schema, free_form=True), {"a": {"x": 1}})
    assert not allows(close_objects({"type": "object"}, free_form=False), A)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 1},
        {"allOf": 1},
        {"properties": {"anyOf": {"type": "object"}, "not": {}}},
        {"required": [[1]], "properties": {}},
        {"allOf": [{"$ref": ref} for ref in ("#", "#/", "x", "#/allOf/9", "#/allOf/²", "#/a/b/c")]},
        {"allOf": [{"$ref": 1}, {"$ref": f"#/allOf/{'9' * 5000}"}]},
        {"type": {"a": 1}, "items": 1, "$defs": [1]},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_is_no_schema_does_no_harm(schema: Any) -> None:
    assert isinstance(close_objects(schema, free_form=True), dict)


def test_a_strict_format_is_closed_and_another_is_as_it_was() -> None:
    def formats(**fields: Any) -> list[Any]:
        schema = {"name": "x", "schema": obj(a=INTEGER), **fields}
        chat = {"type": "json_schema", "json_schema": schema}
        body = {"model": "m", "input": "hi", "text": {"format": {"type": "json_schema", **schema}}}
        chat_grammar = sampling(ChatRequest, response_format=chat).grammar
        grammars = [chat_grammar, ResponsesRequest.model_validate(body).grammar()]
        return [json.loads(grammar.text) for grammar in grammars if grammar]

    for schema in formats(strict=True):
        assert allows(schema, A)
        assert not allows(schema, A_MORE)
    for schema in (*formats(), *formats(strict=False)):
        assert allows(schema, A_MORE)


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("only_strict", [False, True])
def test_the_arguments_of_a_tool_are_closed(strict: bool | None, only_strict: bool) -> None:
    schemas = {"listed": obj(a=obj()), "free": obj(a={"type": "object"}), "none": None}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in schemas.items()
    ]
    use = read(ChatRequest, tools=tools).tool_use.close_schemas(only_strict=only_strict)
    listed, free, none = (tool.schema_of_arguments for tool in use.tools)
    is_open = only_strict and not strict
    assert allows(listed, A_MORE | {"a": {}}) == is_open
    assert allows(listed, {"a": {"x": 1}}) == is_open
    assert allows(free, {"a": {"x": 1}}) == (not strict)
    assert allows(none, A) == is_open
    assert allows(none, {})
