"""References lead to where schemas are expected, and schemas mean what they meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.errors import InvalidRequest
from minisgl.schemas.subschemas import find_referred, with_definitions

TEXT = {"type": "string"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/components/Node"}}}


def resolved(schema: Any, root: Any, depth: int) -> Any:
    """A schema with what its references name in their places, so many levels deep."""
    if isinstance(schema, dict) and "$ref" in schema:
        return resolved(find_referred(root, schema["$ref"]), root, depth - 1) if depth else None
    if isinstance(schema, dict):
        return {name: resolved(value, root, depth) for name, value in schema.items()}
    if isinstance(schema, list):
        return [resolved(value, root, depth) for value in schema]
    return schema


def references(schema: Any) -> list[str]:
    """The references in a schema."""
    if isinstance(schema, dict):
        here = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return here + [each for value in schema.values() for each in references(value)]
    if isinstance(schema, list):
        return [each for value in schema for each in references(value)]
    return []


@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("#/components/schemas/a", {"components": {"schemas": {"a": TEXT}}}),
        ("#/components/a~1b~0c", {"components": {"a/b~c": TEXT}}),
        ("#/components/~01", {"components": {"~1": TEXT}}),
        ("#/components/a%20b", {"components": {"a b": TEXT}}),
        ("#/components/1", {"components": [True, TEXT]}),
        ("http://a.b/c#/components/a", {"$id": "http://a.b/c", "components": {"a": TEXT}}),
        ("http://a.b/c#/components/a", {"$id": "http://a.b/c#", "components": {"a": TEXT}}),
        ("#/$defs/group/a", {"$defs": {"group": {"a": TEXT}}}),
        ("#/$defs", {"$defs": {"anyOf": [TEXT]}}),
        ("#/default", {"default": TEXT}),
        ("#/components/Node", {"components": {"Node": NODE}}),
        ("#/components/a", {"components": {"a": {"$ref": "#/components/b"}, "b": TEXT}}),
        ("#/components/Node/properties/next", {"components": {"Node": NODE}}),
    ],
)
def test_what_a_reference_finds_elsewhere_is_copied_to_the_definitions(
    reference: str, others: dict[str, Any]
) -> None:
    root = {"type": "object", "properties": {"x": {"$ref": reference}}, **others}
    written = with_definitions(root)
    for keyword in ("type", "properties"):
        before = resolved(root[keyword], root, depth=4)
        assert resolved(written[keyword], written, depth=4) == before
    walked = [written["properties"], written["$defs"]]
    assert references(walked)
    assert all(each.startswith("#/$defs/referred-") for each in references(walked))


@pytest.mark.parametrize(
    "reference",
    [
        "#",
        "#/$defs/a",
        "#/definitions/a",
        "#/properties/y",
        "#/properties/y/items",
        "#/properties/z/anyOf/1",
        "#/nowhere",
        "#/$defs/nowhere",
        "#/components/a/b",
        "#name",
        "http://elsewhere.org/b#/components/a",
        5,
    ],
)
def test_other_references_stay(reference: Any) -> None:
    root = {
        "$defs": {"a": TEXT},
        "definitions": {"a": TEXT},
        "components": {"a": None},
        "properties": {
            "x": {"$ref": reference},
            "y": {"items": TEXT},
            "z": {"anyOf": [True, TEXT]},
            "$ref": TEXT,
        },
        "const": {"$ref": "#/components"},
    }
    assert with_definitions(root) == root


def test_references_in_a_schema_with_a_name_of_its_own_stay() -> None:
    """They begin there, not at the root."""
    inner = {"$id": "http://a.b/c", "$ref": "#/components/a", "components": {"a": TEXT}}
    root = {"properties": {"x": inner}, "components": {"a": {"type": "null"}}}
    assert with_definitions(root) == root


def test_names_of_copies_are_not_those_of_definitions() -> None:
    root = {
        "items": [{"$ref": f"#/x/{name}"} for name in "abcb"],
        "x": {"a": 1, "b": 2, "c": 3},
        "$defs": {"referred-2": TEXT},
    }
    written = with_definitions(root)
    assert [find_referred(written, each) for each in references(written["items"])] == [1, 2, 3, 2]
    assert written["$defs"]["referred-2"] == TEXT
    assert len(written["$defs"]) == 4


def test_what_is_copied_is_bounded() -> None:
    """Each level of a nest is copied with all below it."""
    nest: dict[str, Any] = {"title": "a" * 1000}
    way = ["#/x"]
    for _ in range(100):
        nest = {"y": nest}
        way.append(way[-1] + "/y")
    root = {"anyOf": [{"$ref": reference} for reference in way], "x": nest}
    assert len(json.dumps(root)) < 2**15
    with pytest.raises(InvalidRequest, match=r"at most 131,072 characters outside of .*defs"):
        with_definitions(root)
    with_definitions({"$ref": "#/x", "x": {"title": "\u4e2d" * 100_000}})
    few = with_definitions({**root, "anyOf": root["anyOf"][:50]})
    assert len(json.dumps(few)) < 2 * 2**17


@pytest.mark.parametrize("root", [True, None, [], "a", {"$defs": 5, "$ref": "#/x", "x": TEXT}])
def test_what_is_no_schema_stays(root: Any) -> None:
    assert with_definitions(root) == root
