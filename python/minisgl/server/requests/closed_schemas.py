"""Closes the objects of a JSON schema: they get `additionalProperties: false`.

A model that may add properties adds them, and may never end. JSON Schema leaves objects open by
default, and clients often mean them closed.

`additionalProperties` sees only the `properties` beside it. Where an object is described in several
places that hold together (`allOf`; `anyOf` or `$ref` beside `properties`), closing one of them
would forbid what another lists. Such an object stays as it is, with all below it and all that it
refers to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minisgl.schemas import Schema, find_referred, with_definitions, with_subschemas

# Each describes the same value as the schema that it is part of.
_OF_SAME_VALUE = ("anyOf", "oneOf", "$ref", "not", "if", "dependentSchemas")
_OF_PROPERTIES = ("properties", "patternProperties", "required")
_SAY_OTHERWISE = ("additionalProperties", "unevaluatedProperties", "enum", "const")


def close_objects(schema: Schema, *, free_form: bool) -> Schema:
    """A schema whose objects are closed, unless they are explicitly open.

    Args:
        free_form: whether objects that list no properties are closed, too, and so have to be empty.
            The schema itself is closed in any case.

    Raises:
        InvalidRequest: its references name too much (`with_definitions`).
    """
    root = with_definitions(schema)
    return _Closer(root, free_form=free_form).close(root)


class _Closer:
    """Closes the objects of one schema; knows which have to stay open."""

    def __init__(self, root: Schema, *, free_form: bool) -> None:
        self._root = root
        self._free_form = free_form
        self._left_open: set[int] = set()  # ids of parts of the root
        for part in _parts(root):
            if id(part) not in self._left_open and _has_several_descriptions(part):
                self._leave_open(part)

    def close(self, schema: Schema) -> Schema:
        if id(schema) in self._left_open:
            return schema
        closed = {name: self._close_value(name, value) for name, value in schema.items()}
        if self._is_closable(schema):
            closed["additionalProperties"] = False
        return closed

    def _close_value(self, keyword: str, value: Any) -> Any:
        if keyword == "not":  # a closed schema matches less, so that this would match more
            return value
        return with_subschemas(keyword, value, self._close_schema)

    def _close_schema(self, schema: Any) -> Any:
        return self.close(schema) if isinstance(schema, dict) else schema

    def _is_closable(self, schema: Schema) -> bool:
        if any(name in schema for name in (*_SAY_OTHERWISE, *_OF_SAME_VALUE, "allOf")):
            return False
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return _is_object(schema) and (self._free_form or schema is self._root)
        required = schema.get("required")
        return not isinstance(required, list) or all(
            isinstance(name, str) and name in properties for name in required
        )

    def _leave_open(self, schema: Schema) -> None:
        """Leave a schema open, with all below it and all targets of references there."""
        waiting: list[Any] = [schema]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict) and id(node) not in self._left_open:
                self._left_open.add(id(node))
                waiting += [*node.values(), self._referred(node)]

    def _referred(self, schema: Schema) -> Any:
        """The target of a schema's reference: the whole root if that is not a path."""
        reference = schema.get("$ref")
        found = find_referred(self._root, reference)
        return self._root if found is None and isinstance(reference, str) else found


def _parts(schema: Schema) -> Iterator[Schema]:
    """A schema and all objects in it, including those that are not schemas."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _has_several_descriptions(schema: Schema) -> bool:
    branches = schema.get("allOf")
    num_branches = len(branches) if isinstance(branches, list) else 0
    num_same = sum(name in schema for name in _OF_SAME_VALUE)
    is_described_here = any(name in schema for name in _OF_PROPERTIES)
    return num_branches + num_same + is_described_here > 1


def _is_object(schema: Schema) -> bool:
    kinds = schema.get("type")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
