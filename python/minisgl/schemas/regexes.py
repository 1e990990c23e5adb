r"""Rewrites regular expressions that llguidance would not read as their author does.

In a character class Rust reads `[` as a class within it, and `&&`, `--` and `~~` as operations on
sets. Python and JSON Schema (ECMA-262) read characters. Here a class is rewritten to mean the same:

    [ ^ ] \d a-z - ]    not one of: a bracket, a digit, a letter, a hyphen

A `[` that is never closed begins no class. It stays as it is, and llguidance refuses it.
"""

from __future__ import annotations

import re
from typing import Any

from minisgl.errors import InvalidRequest

# An escaped character, or a class: its bracket, what is in it, and its other bracket. A `]` that
# comes first is in it.
_ESCAPE_OR_CLASS = re.compile(r"\\.|(\[\^?)(\]?(?:[^\\\]]|\\.)*)(\]?)", re.DOTALL)
# Escapes of more than two characters: of a code, or of a property, whose names are short.
_LONG = r"[xuUpP]\{[^}]{1,64}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP][A-Za-z]"
_ITEM = rf"\\(?:{_LONG}|.)|[^\\]"
# One item of a class, or two with a hyphen between them.
_ITEM_OR_RANGE = re.compile(rf"({_ITEM})(?:-({_ITEM}))?", re.DOTALL)
_SETS = tuple(rf"\{letter}" for letter in "dDwWsSpPbB")  # escapes that are no end of a range
_MISREAD = frozenset("[]&~-# ")  # the last two with the flag x, by which Rust ignores them
_MAY_HAVE_NUL = re.compile(r"\\(?:[xu]\{?0|0|[pP])|\x00")  # items of a class
_FLAG_X = re.compile(r"\(\?[a-zA-Z]*x")


def check_regex(pattern: str) -> None:
    """Refuse a pattern that llguidance would misread, and that cannot be rewritten.

    Such is a pattern with the flag x, which ignores white space, and with tabs or line breaks: they
    would be text, and a comment would not end. Another ends within an escape, and would match
    anything.

    Raises:
        InvalidRequest: it is such a pattern.
    """
    # Groups, repetitions and characters remain. The blanks keep them from forming new tokens.
    rest = _ESCAPE_OR_CLASS.sub(" ", pattern)
    if rest.endswith("\\"):
        raise InvalidRequest(
            "a regular expression must not end with a single backslash", param="grammar"
        )
    if _FLAG_X.search(rest) and re.search(r"[\t\n\r]", pattern):
        raise InvalidRequest(
            "a regular expression with the flag x must have no tabs and no line breaks",
            param="grammar",
        )


def readable_regex(pattern: str) -> str:
    """A pattern whose character classes Rust reads as Python and JSON Schema do."""
    return _ESCAPE_OR_CLASS.sub(_readable_class, pattern)


def readable_regex_of_strings(pattern: str) -> str:
    r"""A readable pattern for strings of JSON, whose classes do not match NUL.

    There llguidance lets any class that has NUL match quotes and backslashes, too, such as `[^"]`.

    Raises:
        InvalidRequest: as `check_regex`.
    """
    check_regex(pattern)
    return _ESCAPE_OR_CLASS.sub(_without_nul, readable_regex(pattern))


def readable_names(schemas: dict[str, Any]) -> dict[str, Any]:
    """Schemas by readable patterns of names, as `patternProperties` has them.

    Raises:
        InvalidRequest: as `check_regex`, or two of the patterns become equal. llguidance itself
            refuses different patterns that match the same name.
    """
    readable = {readable_regex_of_strings(name): schema for name, schema in schemas.items()}
    if len(readable) < len(schemas):
        raise InvalidRequest(
            "patternProperties has regular expressions that are equal", param="grammar"
        )
    return readable


def _without_nul(found: re.Match[str]) -> str:
    opening, items, closing = found.groups()
    if not closing:
        return found[0]
    if opening == "[^":
        return rf"[^\x00{items}]"
    return rf"[{found[0]}&&[^\x00]]" if _MAY_HAVE_NUL.search(items) else found[0]


def _readable_class(found: re.Match[str]) -> str:
    opening, items, closing = found.groups()
    if not closing:
        return found[0]
    return opening + _ITEM_OR_RANGE.sub(_readable_items, items) + closing


def _readable_items(found: re.Match[str]) -> str:
    first, last = found.groups()
    if last is None:
        return _as_character(first)
    is_range = not first.startswith(_SETS) and not last.startswith(_SETS)
    hyphen = "-" if is_range else r"\-"
    return _as_character(first) + hyphen + _as_character(last)


def _as_character(item: str) -> str:
    return f"\\{item}" if item in _MISREAD else item
