"""JSON schemas as llguidance reads them.

It refuses each keyword that it does not know, also where it changes nothing. Libraries write
such ones: `propertyNames` of a record whose keys are any texts, `uniqueItems: false`. It misreads
some regular expressions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from minisgl.regexes import check_regex

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
# What a schema has that is not to be handed on as it is: such a keyword, or flags of a pattern.
_NOTABLE = re.compile("|".join([r"\(\?", *{f'"{keyword}"' for keyword, _ in _IDLE}]))
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


def readable_schema(text: str) -> str:
    """A schema without keywords that llguidance refuses and that change nothing.

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
    for pattern in _patterns(schema):
        check_regex(pattern)
    return {
        keyword: with_subschemas(keyword, value, _readable)
        for keyword, value in schema.items()
        if not _is_idle(keyword, value)
    }


def _patterns(schema: dict[str, Any]) -> list[str]:
    """The regular expressions of a schema itself."""
    of_names = schema.get("patternProperties")
    names = list(of_names) if isinstance(of_names, dict) else []
    own = schema.get("pattern")
    return [*names, own] if isinstance(own, str) else names


def _is_idle(keyword: str, value: Any) -> bool:
    """Whether a keyword allows everything. 0 is no schema and no flag, though it equals False."""
    return any(
        keyword == other and value == idle and type(value) is type(idle) for other, idle in _IDLE
    )
