"""The message of an invalid request: one sentence about a field that was sent.

pydantic reports an error for each branch of a union and names its own types. Here one error is
chosen, its field is found in the body, and types have their names in JSON. Knows no endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError

from minisgl.errors import InvalidRequest
from minisgl.server.requests.validation import COUNT_ERRORS

Fault: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]

_MAX_QUOTED = 40  # characters of a value
_MAX_BITS = 128
_KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_WORDS = {
    "missing": "it is required",
    "extra_forbidden": "there is no such field",
    "greater_than": "it must be > {gt}",
    "greater_than_equal": "it must be >= {ge}",
    "less_than": "it must be < {lt}",
    "less_than_equal": "it must be <= {le}",
    "literal_error": "it must be {expected}",
    "union_tag_invalid": "it must be one of {expected_tags}",
    "too_short": "it has {actual_length} items; at least {min_length} must be sent",
    "string_too_short": "it must have at least {min_length} characters",
    "string_too_long": "it must have at most {max_length} characters",
    "string_pattern_mismatch": "it must match {pattern}",
    "string_unicode": "the text has half a surrogate pair",
    "finite_number": "it must be a finite number",
    "int_parsing_size": "it must be an integer of 64 bits",
}
_SELF_EVIDENT = {"missing", "extra_forbidden", "too_short", "string_unicode"}  # without a value


def invalid_request(error: ValidationError, body: Any) -> InvalidRequest:
    """The error to answer: one fault, or the types that the branches of a union expect at a path.

    A fault of a list that is too long goes first; then the deepest; then the one that is furthest
    in its lists; then one whose value has the right type.
    """
    located = [(_locate(fault, body), fault) for fault in error.errors(include_url=False)]
    path, fault = max(located, key=_fitness)
    param = ".".join(map(str, path)) or None
    reason = _reason(fault)
    if _is_of_kind(fault):
        beside = [other for other_path, other in located if other_path == path]
        kinds = [_kind(other) for other in beside if _is_of_kind(other)]
        reason = f"it must be {_any_of(kinds)}, got {quote(fault['input'])}"
    message = f"{param}: {reason}" if param else reason
    return InvalidRequest(message, param=param, code=_code(fault))


def _fitness(located: tuple[Path, Fault]) -> tuple[bool, int, list[int], bool]:
    path, fault = located
    indexes = [key for key in path if isinstance(key, int)]
    return fault["type"] in COUNT_ERRORS, len(path), indexes, not _is_of_kind(fault)


def _is_of_kind(fault: Fault) -> bool:
    """Whether the fault is that a value has another type than the field."""
    is_literal = fault["type"] == "literal_error"
    return fault["type"] in _KINDS or (is_literal and not isinstance(fault["input"], str))


def _kind(fault: Fault) -> str:
    if fault["type"] == "literal_error":
        return str(fault["ctx"]["expected"])
    return _KINDS[fault["type"]]


def _code(fault: Fault) -> str:
    if fault["type"] in _KINDS:
        return "invalid_type"
    return "invalid_value" if fault["type"].startswith("union_tag") else str(fault["type"])


def _any_of(kinds: list[str]) -> str:
    *others, last = dict.fromkeys(kinds)
    return f"{', '.join(others)} or {last}" if others else last


def _reason(fault: Fault) -> str:
    kind = fault["type"]
    if kind == "union_tag_not_found":
        return f"it must be an object with a {_tag_field(fault)} that is a string"
    if kind not in _WORDS:
        return str(fault["msg"]).removeprefix("Value error, ")
    words = _WORDS[kind].format_map(fault.get("ctx", {}))
    value = fault["input"]
    if kind == "union_tag_invalid":
        value = value[_tag_field(fault)]  # pydantic's own tag is a text, whatever was sent
    return words if kind in _SELF_EVIDENT else f"{words}, got {quote(value)}"


def quote(value: Any) -> str:
    """A short excerpt of a JSON value, for an error."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    if isinstance(value, str) and len(value) > _MAX_QUOTED:
        return f"{json.dumps(value[:_MAX_QUOTED])} and {len(value) - _MAX_QUOTED} more characters"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    return json.dumps(value)


def _locate(fault: Fault, body: Any) -> Path:
    """The fields and indexes of a fault, without pydantic's names for branches of unions.

    A branch may have the name of a field. Of the ways to read a location, the one that ends at the
    faulty value is right.
    """
    loc = fault["loc"]
    if fault["type"] == "missing":
        *loc, name = loc
        return (*_resolve(loc, body, fault["input"]), name)
    path = _resolve(loc, body, fault["input"])
    if fault["type"] == "union_tag_invalid":
        return (*path, _tag_field(fault))
    return path


def _tag_field(fault: Fault) -> str:
    """The field that says which branch of a union an object is."""
    discriminator: str = fault["ctx"]["discriminator"]  # quoted, or the call of a function
    return discriminator.strip("'") if discriminator.startswith("'") else "type"


def _resolve(loc: Sequence[Any], body: Any, value: Any) -> Path:
    readings = list(_readings(loc, body, ()))
    return next((path for path, found in readings if found is value), readings[0][0])


def _readings(loc: Sequence[Any], body: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The ways to follow a location through the body, those with the most fields first."""
    if not loc:
        yield path, body
        return
    key, *rest = loc
    if _has(body, key):
        yield from _readings(rest, body[key], (*path, key))
    if isinstance(key, str):
        yield from _readings(rest, body, path)
    elif not _has(body, key):
        yield path, body


def _has(body: Any, key: Any) -> bool:
    if isinstance(body, dict):
        return key in body
    # A text, which names a branch of a union, is no index. `in range` would compare it with all.
    return isinstance(body, list) and isinstance(key, int) and key < len(body)
