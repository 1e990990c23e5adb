"""JSON schemas as llguidance reads them.

It refuses each keyword that it does not know, also where it changes nothing. Libraries write
such ones: `propertyNames` of a record whose keys are any texts, `uniqueItems: false`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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
_KEYWORDS = {keyword for keyword, _ in _IDLE}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not")


def with_subschemas(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, with each schema in it changed."""
    if keyword in _OF_NAMES and isinstance(value, dict):
        return {name: change(schema) for name, schema in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [change(schema) for schema in value]
    return change(value) if keyword in _SINGLE else value


def without_idle_keywords(text: str) -> str:
    """A schema without keywords that llguidance refuses and that change nothing.

    What is no schema stays as it is: who reads it says what is wrong.
    """
    if not any(f'"{keyword}"' in text for keyword in _KEYWORDS):
        return text
    try:
        return json.dumps(_cleaned(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def _cleaned(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: with_subschemas(keyword, value, _cleaned)
        for keyword, value in schema.items()
        if not _is_idle(keyword, value)
    }


def _is_idle(keyword: str, value: Any) -> bool:
    """Whether a keyword allows everything. 0 is no schema and no flag, though it equals False."""
    return any(
        keyword == other and value == idle and type(value) is type(idle) for other, idle in _IDLE
    )
