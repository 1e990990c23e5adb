"""Rewrites JSON schemas for llguidance.

llguidance refuses each keyword that it does not know, even where that changes nothing. Libraries
write such keywords: `propertyNames` of a record with any keys, `uniqueItems: false`. It misreads
some regular expressions and numbers, which are rewritten or refused here. Names that
`propertyNames` lists are rewritten as `properties`, and so are those of a pattern that matches no
other names. Characters of references are encoded as in a URI, which `$ref` has to be.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from minisgl.errors import InvalidRequest
from minisgl.schemas.names import FewNames
from minisgl.schemas.numbers import BOUNDS, check_literals, write_bounds
from minisgl.schemas.regexes import readable_names, readable_regex_of_strings
from minisgl.schemas.subschemas import Schema, find_referred, with_definitions, with_subschemas

# Keywords with values that make them allow everything.
_IDLE: list[tuple[str, Any]] = [
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
    ("format", "password"),  # for programs that show the value
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
    ("propertyNames", True),
    ("unevaluatedItems", {}),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", {}),
    ("unevaluatedProperties", True),
    ("uniqueItems", False),
]
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
_LITERALS = ("const", "enum")
_KEYWORDS = {
    "pattern",
    "patternProperties",
    *_COUNTS,
    *BOUNDS,
    *(keyword for keyword, _ in _IDLE),
}
_IN_URI = "%/:?#@!$&'()*+,;="  # besides letters, digits and _.-~
_ENCODED = rf'"\$ref":\s*"[\w.~{_IN_URI}-]*[^\w.~{_IN_URI}"-]'  # a reference to encode
# Matches in every schema that may need a change: one of these keywords, an escaped letter of it,
# a literal that may be a number of many digits or with an exponent, or such a reference.
_NOTABLE = re.compile(
    "|".join(
        [r"\\u00|[0-9][0-9.]{15}|[0-9][eE]", _ENCODED, *(f'"{keyword}"' for keyword in _KEYWORDS)]
    ),
    re.ASCII,
)
# The most characters that are written for names of properties: as many as a whole grammar may
# have. By a short reference, a long list of names is repeated.
_MAX_WRITTEN = 2**17
_ANNOTATIONS = ("title", "description")


def readable_schema(text: str) -> str:
    """A schema without the parts that llguidance would misread, or refuse though they do nothing.

    A text that is no schema stays as it is: llguidance says what is wrong.

    Raises:
        InvalidRequest: llguidance would misread a regular expression or a number in it, or count
            names twice (`minProperties`); or its references name too much (`with_definitions`).
            A schema without any keyword to change is not checked.
    """
    if _NOTABLE.search(text) is None:
        return text
    try:
        schema = with_definitions(json.loads(text))
        return json.dumps(_Reader(schema).readable(schema))
    except (ValueError, RecursionError):
        return text


class _Reader:
    """Rewrites one schema for llguidance. References are relative to its root."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._room = _MAX_WRITTEN
        self._names = FewNames()

    def readable(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        readable = {
            keyword: self._readable_value(keyword, value)
            for keyword, value in schema.items()
            if not _is_idle(keyword, value)
        }
        write_bounds(readable)
        if "propertyNames" in readable:
            readable = self._with_known_names(readable)
        if "patternProperties" in readable:
            readable = self._without_listed_patterns(readable)
        _check_min_properties(readable)
        return readable

    def _readable_value(self, keyword: str, value: Any) -> Any:
        if keyword in _LITERALS:
            check_literals(keyword, value)
        if keyword == "$ref" and isinstance(value, str):
            return quote(value, safe=_IN_URI)
        readable = with_subschemas(keyword, value, self.readable)
        if keyword == "pattern" and isinstance(value, str):
            return readable_regex_of_strings(value)
        if keyword == "patternProperties" and isinstance(value, dict):
            return readable_names(readable)
        return _without_fraction(readable) if keyword in _COUNTS else readable

    def _with_known_names(self, schema: Schema) -> Schema:
        """A schema with rewritten `propertyNames`, or as it is if they cannot be rewritten."""
        if self._room < 0 or schema.get("patternProperties"):
            return schema
        rules = self._rules_of_names(schema["propertyNames"])
        match list(rules.items()):
            case [("const", str(name))]:
                return self._with_names(schema, [name])
            case [("enum", list(names))] if all(isinstance(name, str) for name in names):
                return self._with_names(schema, names)
            case [("pattern", str(pattern))]:
                return self._with_pattern(schema, readable_regex_of_strings(pattern))
        lengths = _lengths(rules)
        if lengths is None:
            return schema
        least, most = lengths
        if most is not None and least > most:
            return self._with_names(schema, [])
        return self._with_pattern(schema, f"^(?s:.{{{least},{'' if most is None else most}}})$")

    def _rules_of_names(self, names: Any) -> Schema:
        """The schema that `propertyNames` stands for; it may be in a definition."""
        rules = _restrictions(names)
        if len(rules) == 1 and "$ref" in rules:
            return _restrictions(find_referred(self._root, rules["$ref"]))
        return rules

    def _with_pattern(self, schema: Schema, pattern: str) -> Schema:
        if schema.get("properties"):  # which of them match is not known here
            return schema
        self._room -= len(pattern)
        value = schema.get("additionalProperties", True)
        return _closed(schema, "patternProperties", {pattern: value})

    def _with_names(self, schema: Schema, names: list[str]) -> Schema:
        listed = schema.get("properties", {})
        value = schema.get("additionalProperties", True)
        self._room -= len(json.dumps(names)) + len(names) * len(json.dumps(value))
        if self._room < 0 or not isinstance(listed, dict):
            return schema
        allowed = set(names)
        properties = {name: listed[name] for name in listed if name in allowed}
        if value is not False:
            for name in names:
                properties.setdefault(name, value)
        return _closed(schema, "properties", properties)

    def _without_listed_patterns(self, schema: Schema) -> Schema:
        """A schema without those patterns whose names are all listed or required.

        Behind a property llguidance would allow a comma for one more name of such a pattern, though
        there is none.
        """
        patterns = schema["patternProperties"]
        listed = schema.get("properties", {})
        are_dicts = isinstance(patterns, dict) and isinstance(listed, dict)
        if self._room < 0 or not are_dicts:
            return schema
        known = dict.fromkeys([*listed, *_required(schema)])
        most = len(known)
        few = {pattern: names for pattern in patterns if (names := self._names.of(pattern, most))}
        taken = [pattern for pattern, names in few.items() if names <= known.keys()]
        properties = dict(listed)
        for name in known:
            for value in (patterns[pattern] for pattern in taken if name in few[pattern]):
                self._room -= len(json.dumps(value))
                here = properties.get(name, True)
                properties[name] = value if here is True else {"allOf": [here, value]}
        if not taken or self._room < 0:
            return schema
        others = {pattern: patterns[pattern] for pattern in patterns if pattern not in taken}
        return {**schema, "properties": properties, "patternProperties": others}


def _required(schema: Schema) -> list[str]:
    """The names that a schema requires, each once."""
    required = schema.get("required")
    listed = required if isinstance(required, list) else []
    return list(dict.fromkeys(name for name in listed if isinstance(name, str)))


def _check_min_properties(schema: Schema) -> None:
    """Refuse to count properties whose names a grammar cannot tell apart.

    llguidance counts the names that are written. A name that is written twice counts as two there,
    but is one property for a reader. Literals have fixed names, so they are no problem.
    """
    if any(keyword in schema for keyword in _LITERALS):
        return
    least = schema.get("minProperties")
    types = schema.get("type", "object")
    is_object = "object" in (types if isinstance(types, list) else [types])
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if type(least) is not int or not is_object or is_closed:
        return
    names = _required(schema)
    if least > len(names) + 1:
        raise InvalidRequest(
            f"minProperties is {least}, it may be {len(names) + 1}: of an object whose names are "
            f"open a grammar can hold {len(names)} required names and one other",
            param="grammar",
        )


def _restrictions(schema: Any) -> Schema:
    """The keywords of a schema of names that forbid some."""
    if not isinstance(schema, dict):
        return {}
    said = {keyword: schema[keyword] for keyword in schema if keyword not in _ANNOTATIONS}
    if said.get("type") == "string":
        del said["type"]
    return said


def _lengths(rules: Schema) -> tuple[int, int | None] | None:
    """The least and the greatest length of names, if any; None if they have other rules, too."""
    if not rules or not set(rules) <= {"minLength", "maxLength"}:
        return None
    lengths = {keyword: _without_fraction(value) for keyword, value in rules.items()}
    if not all(type(length) is int and length >= 0 for length in lengths.values()):
        return None
    return lengths.get("minLength", 0), lengths.get("maxLength")


def _without_fraction(number: Any) -> Any:
    """2.0 is an integer in JSON Schema."""
    is_integer = isinstance(number, float) and number.is_integer()
    return int(number) if is_integer else number


def _closed(schema: Schema, keyword: str, schemas: dict[str, Any]) -> Schema:
    """An object that has these properties instead of those whose names `propertyNames` allows."""
    others = {name: value for name, value in schema.items() if name != "propertyNames"}
    return {**others, keyword: schemas, "additionalProperties": False}


def _is_idle(keyword: str, value: Any) -> bool:
    """Whether a keyword allows everything. 0 is no schema and no flag, though it equals False."""
    return any(
        keyword == other and value == idle and type(value) is type(idle) for other, idle in _IDLE
    )
