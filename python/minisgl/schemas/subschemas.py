"""Where in a JSON schema there are schemas, and the targets of its references.

    with_subschemas   changes the schemas in the value of a keyword
    find_referred     the target of a reference
    with_definitions  copies targets that are elsewhere to where schemas are expected

Code that changes a schema goes from its root through the values of keywords. It would miss schemas
that only a reference finds, such as OpenAPI's `#/components/schemas/…`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import unquote

from minisgl.errors import InvalidRequest

Schema: TypeAlias = dict[str, Any]

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not")
# The most characters that are copied: as many as a whole grammar may have. Targets of references
# may overlap, and what they share is copied for each.
_MAX_COPIED = 2**17


def with_subschemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with each schema in it changed."""
    if keyword in _OF_NAMES and isinstance(value, dict):
        return {name: change(schema) for name, schema in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [change(schema) for schema in value]
    return change(value) if keyword in _SINGLE else value


def find_referred(root: Any, reference: Any) -> Any:
    """The part of a root that a reference names; None if it names none."""
    steps = [] if reference == "#" else _steps(root, reference)
    if steps is None:
        return None
    node = root
    for step in steps:
        node = _child(node, step)
    return node


def with_definitions(root: Any) -> Any:
    """A schema whose references by path lead to where schemas are expected.

    References by name (`$id`, `$anchor`) stay, and so do those in a schema with a name of its own.

    Raises:
        InvalidRequest: the targets are larger than may be copied.
    """
    if not isinstance(root, dict) or not isinstance(root.get("$defs", {}), dict):
        return root
    return _Copier(root).copied()


class _Copier:
    """Copies the targets of a root's references to its `$defs`, if they are elsewhere."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # of the copies, by reference
        self._waiting: list[str] = []  # references whose copies are still to be made
        self._room = _MAX_COPIED
        taken = root.get("$defs", {})
        numbered = (f"referred-{number}" for number in itertools.count(1))
        self._unused_names = (name for name in numbered if name not in taken)

    def copied(self) -> Schema:
        result: Schema = self._with_names(self._root)
        definitions: dict[str, Any] = {}
        while self._waiting:
            reference = self._waiting.pop()
            copy = self._with_names(find_referred(self._root, reference))
            self._room -= len(json.dumps(copy, ensure_ascii=False))
            if self._room < 0:
                raise InvalidRequest(
                    f"references of a schema must name at most {_MAX_COPIED:,} characters outside "
                    "of $defs, definitions and other keywords of schemas; these name more",
                    param="grammar",
                )
            definitions[self._names[reference]] = copy
        if definitions:
            result["$defs"] = {**result.get("$defs", {}), **definitions}
        return result

    def _with_names(self, schema: Any) -> Any:
        """A schema that refers to copies by their names. Below another `$id` references stay."""
        if not isinstance(schema, dict) or (schema is not self._root and "$id" in schema):
            return schema
        return {keyword: self._with_name(keyword, value) for keyword, value in schema.items()}

    def _with_name(self, keyword: str, value: Any) -> Any:
        if keyword == "$ref":
            return self._named(value)
        return with_subschemas(keyword, value, self._with_names)

    def _named(self, reference: Any) -> Any:
        steps = _steps(self._root, reference)
        if steps is None or _leads_to_schema(self._root, steps):
            return reference
        if find_referred(self._root, reference) is None:  # llguidance says what is wrong
            return reference
        if reference not in self._names:
            self._names[reference] = next(self._unused_names)
            self._waiting.append(reference)
        return f"#/$defs/{self._names[reference]}"


def _steps(root: Any, reference: Any) -> list[str] | None:
    """The names on the path from the root; None if a reference is not a path to a part of it."""
    if not isinstance(reference, str):
        return None
    document, _, pointer = reference.partition("#")
    own_name = root.get("$id") if isinstance(root, dict) else None
    if (document and own_name not in (document, f"{document}#")) or not pointer.startswith("/"):
        return None
    steps = unquote(pointer).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def _leads_to_schema(root: Any, steps: list[str]) -> bool:
    """Whether a path goes from schema to schema, as `with_subschemas` does."""
    node = root
    left = steps[::-1]
    while left:
        keyword = left.pop()
        node = _child(node, keyword)
        has_several = (keyword in _OF_NAMES and isinstance(node, dict)) or (
            keyword in _LISTS and isinstance(node, list)
        )
        if has_several and left:
            node = _child(node, left.pop())
        elif has_several or keyword not in _SINGLE:
            return False
    return True


def _child(node: Any, step: str) -> Any:
    """The value in an object or a list that a step of a reference names; None if there is none."""
    if isinstance(node, dict):
        return node.get(step)
    if isinstance(node, list) and re.fullmatch("[0-9]{1,5}", step) and int(step) < len(node):
        return node[int(step)]
    return None
