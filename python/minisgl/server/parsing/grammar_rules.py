"""Pieces of llguidance's variant of Lark, of which the grammars of calls and thoughts are made.

Reference: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeAlias

from minisgl.core import Grammar
from minisgl.sampling_params import JSON_OPTIONS

Markers: TypeAlias = Mapping[str, int]  # the tokens that a tokenizer never splits, and their ids


def marker(text: str, markers: Markers) -> str:
    """A marker as its own token; else, or where llguidance takes that for plain text, spelled out."""
    spelled = json.dumps(text)
    return f"(<[{markers[text]}]> | {spelled})" if text in markers else spelled


def text_without(text: str) -> str:
    """The body of a terminal: whatever does not have a text in it."""
    return rf"/(?s:.*)/ & ~/(?s:.*){_slashed(re.escape(text))}(?s:.*)/"


def text_to(end: str, markers: Markers) -> list[str]:
    """A rule `text`: whatever comes before a marker, and the marker."""
    if end in markers:
        return [f"text: TEXT <[{markers[end]}]>", f"TEXT: {text_without(end)}"]
    return [f"text[lazy]: /(?s:.*){_slashed(re.escape(end))}/"]


def nested(grammar: Grammar) -> str:
    """A whole grammar as the body of a rule."""
    match grammar.kind:
        case "json_schema":
            return f"%json {_with_options(grammar.text)}"
        case "regex":
            return f"/{_slashed(grammar.text)}/"
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"


def _with_options(schema: str) -> str:
    """A schema that says how its JSON is to be written, which no option says where it is nested."""
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):  # the engine will say what is wrong with it
        return schema
    return json.dumps({"x-guidance": JSON_OPTIONS, **value}) if isinstance(value, dict) else schema


def _slashed(pattern: str) -> str:
    """A pattern as it may stand between slashes on one line."""
    written = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"\\[^\n\r]|[/\n\r]", lambda found: written.get(found[0], found[0]), pattern)
