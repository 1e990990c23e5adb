"""Rules for grammars of tool calls and reasoning, in llguidance's variant of Lark.

Reference: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeAlias

from minisgl.core import Grammar
from minisgl.sampling_params import JSON_OPTIONS
from minisgl.schemas import readable_regex, readable_schema

AddedTokens: TypeAlias = Mapping[
    str, int
]  # the tokens that a tokenizer never splits, and their ids


def marker_rule(text: str, added_tokens: AddedTokens) -> str:
    """A marker, as its own token or as text.

    Text is for markers without a token, and for places where llguidance takes the token for text.
    """
    literal = json.dumps(text)
    return f"(<[{added_tokens[text]}]> | {literal})" if text in added_tokens else literal


def text_without(text: str) -> str:
    """The body of a terminal that matches any text without a given one in it."""
    return rf"/(?s:.*)/ & ~/(?s:.*){_escape_slashes(re.escape(text))}(?s:.*)/"


def text_rules(end: str, added_tokens: AddedTokens) -> list[str]:
    """A rule `text`: any text up to a marker, and the marker."""
    if end in added_tokens:
        return [f"text: TEXT <[{added_tokens[end]}]>", f"TEXT: {text_without(end)}"]
    return [f"text[lazy]: /(?s:.*){_escape_slashes(re.escape(end))}/"]


def text_then(marker: str, rest: str, added_tokens: AddedTokens) -> list[str]:
    """A rule `start`: any text, in which a marker is always followed by a `rest`."""
    starts = ["TEXT", f"before {rest}"]
    if marker in added_tokens:
        starts.append(f"TEXT <[{added_tokens[marker]}]> {rest}")
    return [
        f"start: {' | '.join(starts)}",
        f"TEXT: {text_without(marker)}",
        f"before[lazy]: /(?s:.*){_escape_slashes(re.escape(marker))}/",
    ]


def nested_grammar(grammar: Grammar) -> str:
    """A whole grammar as the body of a rule."""
    match grammar.kind:
        case "json_schema":
            return f"%json {_with_options(readable_schema(grammar.text))}"
        case "regex":
            return f"/{_escape_slashes(readable_regex(grammar.text))}/"
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"


def _with_options(schema: str) -> str:
    """A schema with the options of its JSON, which a nested grammar does not get otherwise."""
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):  # the engine reports what is wrong with it
        return schema
    return json.dumps({"x-guidance": JSON_OPTIONS, **value}) if isinstance(value, dict) else schema


def _escape_slashes(pattern: str) -> str:
    """A pattern as it may stand between slashes on one line."""
    escapes = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    return re.sub(r"\\[^\n\r]|[/\n\r]", lambda found: escapes.get(found[0], found[0]), pattern)
