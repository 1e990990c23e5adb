"""JSON schemas as llguidance reads them.

It refuses each keyword that it does not know, also where it changes nothing. Libraries write
such ones: `propertyNames` of a record whose keys are any texts, `uniqueItems: false`. It misreads
some regular expressions, which are written otherwise or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from minisgl.errors import InvalidRequest
from minisgl.regexes import check_regex, readable_regex

# Keywords with values by which they allow everything.
_IDLE: list[tuple[str, Any]] = [
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
    ("format", "password"),  # for who shows the value
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
    ("propertyNames", True),
    ("unevaluatedItems", {}),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", {}),
    ("unevaluatedProperties", True),
    ("uniqueItems", False),
]
_KEYWORDS = {"pattern", "patternProperties", *(keyword for keyword, _ in _IDLE)}
# What a schema has that may not be handed on as it is: such a keyword, or an escaped letter of it.
_NOTABLE = re.compile("|".join([r"\\u00", *(f'"{keyword}"' for keyword in _KEYWORDS)]))
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not")


def with_subschemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with each schema in it changed."""
    if keyword in _OF_NAMES and isinstance(value, dict):
        return {name: change(schema) for name, schema in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [change(schema) for schema in value]
    return change(value) if keyword in _SINGLE else value


def readable_schema(text: str) -> str:
    """A schema without what llguidance refuses though it changes nothing, or reads otherwise.

    What is no schema stays as it is: who reads it says what is wrong.

    Raises:
        InvalidRequest: llguidance would misread a regular expression in it.
    """
    if _NOTABLE.search(text) is None:
        return text
    try:
        schema = json.loads(text)
        return json.dumps(_readable(schema))
    except (ValueError, RecursionError):
        return text


def _readable(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _readable_value(keyword, value)
        for keyword, value in schema.items()
        if not _is_idle(keyword, value)
    }


def _readable_value(keyword: str, value: Any) -> Any:
    readable = with_subschemas(keyword, value, _readable)
    if keyword == "pattern" and isinstance(value, str):
        return _checked_regex(value)
    if keyword == "patternProperties" and isinstance(value, dict):
        return _by_readable_regex(readable)
    return readable


def _by_readable_regex(schemas: dict[str, Any]) -> dict[str, Any]:
    by_regex = {_checked_regex(pattern): schema for pattern, schema in schemas.items()}
    if len(by_regex) < len(schemas):  # llguidance refuses any that match the same name
        raise InvalidRequest(
            "patternProperties has regular expressions that are equal", param="grammar"
        )
    return by_regex


def _checked_regex(pattern: str) -> str:
    check_regex(pattern)
    return readable_regex(pattern)


def _is_idle(keyword: str, value: Any) -> bool:
    """Whether a keyword allows everything. 0 is no schema and no flag, though it equals False."""
    return any(
        keyword == other and value == idle and type(value) is type(idle) for other, idle in _IDLE
    )
