r"""The formats of tool calls: how each is parsed, and the grammar that enforces it.

    hermes       Qwen2.5, Qwen3, Hermes:  <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>
    llama3_json  Llama 3.1 and later:     {"name": "f", "parameters": {…}}; …
    mistral      Mistral:                 [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
                 or, with such a template: [TOOL_CALLS]f[ARGS]{…}

A model is trained on one of them, which its chat template shows.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from minisgl.core import Grammar
from minisgl.sampling_params import TOOL_NOTE
from minisgl.schemas import readable_schema
from minisgl.server.parsing.grammar_rules import (
    AddedTokens,
    marker_rule,
    nested_grammar,
    text_then,
)
from minisgl.server.parsing.tool_calls import CallSyntax, ToolCallParser
from minisgl.server.requests.tools import MAX_TOOL_NAME, Function, ToolUse

_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_MAX_NAME = 2 * MAX_TOOL_NAME + 1  # that of a namespace, a dot, and the function's own
_NAME = rf"(?P<name>[\w.-]{{1,{_MAX_NAME}}})"
_HEAD = rf'\{{\s*{_TYPE}(?:"name"\s*:\s*"{_NAME}"\s*,\s*)?"(?:arguments|parameters)"\s*:\s*(?=\{{)'
_TAIL = rf'\s*(?:,\s*(?:"name"\s*:\s*"{_NAME}"|"(?:id|type)"\s*:\s*"[^"\\]*")\s*)*\}}'
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolFormat(ABC):
    """One format, in the variant of this chat template."""

    syntax: ClassVar[CallSyntax]
    id_format: ClassVar[str] = "call_{:.24}"

    def __init__(self, template: str) -> None:
        self._template = template

    @abstractmethod
    def begin(self, added_tokens: AddedTokens) -> str:
        """The marker that begins calls, as part of a Lark rule; empty if there is none."""

    @abstractmethod
    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:
        """A Lark grammar of one call, or with `several` of one or more, without `begin`."""

    @abstractmethod
    def text_or_calls(self, added_tokens: AddedTokens) -> list[str]:
        """A Lark rule `start`: any text, then `calls` or no call. And the rules that it needs."""

    def grammar(
        self, use: ToolUse, added_tokens: AddedTokens, answer: Grammar | None = None
    ) -> Grammar:
        """A grammar of answers whose calls follow the tools' schemas.

        Args:
            answer: the grammar of an answer without calls; None means any text.
        """
        calls = Grammar(
            "lark", self.calls(use.callable_tools, added_tokens, several=use.allows_several_calls)
        )
        begin = self.begin(added_tokens)
        if use.must_call:
            rules = [f"start: {begin} calls"]
        elif answer:
            rules = [f"start: answer | {begin} calls", f"answer: {nested_grammar(answer)}"]
        else:
            rules = self.text_or_calls(added_tokens)
        rules.append(f"calls: {nested_grammar(calls)}")
        return Grammar("lark", "\n".join(rules))

    def make_parser(self, use: ToolUse, *, eager: bool) -> ToolCallParser:
        return ToolCallParser(self.syntax, use, self.new_id, eager=eager)

    def new_id(self) -> str:
        return self.id_format.format(uuid.uuid4().hex)


class MarkedFormat(ToolFormat):
    """A format whose calls a marker begins, wherever they stand."""

    marker: ClassVar[str]

    def begin(self, added_tokens: AddedTokens) -> str:
        return marker_rule(self.marker, added_tokens)

    def text_or_calls(self, added_tokens: AddedTokens) -> list[str]:
        return text_then(self.marker, "calls", added_tokens)


class Hermes(MarkedFormat):
    marker = "<tool_call>"
    syntax = CallSyntax(rf"(?<!\s)\s*<tool_call>\s*{_HEAD}", _TAIL, closing=r"\s*</tool_call>")

    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:
        end = marker_rule("</tool_call>", added_tokens)
        call = rf'call: "\n" object "\n" {end}'
        more = rf' ("\n" {self.begin(added_tokens)} call)*' if several else ""
        return "\n".join([f"start: call{more}", call, *_objects(tools, "arguments")])


class Llama3Json(ToolFormat):
    syntax = CallSyntax(
        rf"(?<!\s)\s*<\|python_tag\|>\s*{_HEAD}",
        _TAIL,
        again=rf"[\s;]*(?:<\|python_tag\|>\s*)?{_HEAD}",
        opens_answer=True,
    )

    def begin(self, added_tokens: AddedTokens) -> str:  # noqa: ARG002
        return ""

    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:  # noqa: ARG002
        start = f"start: {_one_or('object', several, '; ')}"
        return "\n".join([start, *_objects(tools, "parameters")])

    def text_or_calls(self, added_tokens: AddedTokens) -> list[str]:  # noqa: ARG002
        return ["start: TEXT | calls", r"TEXT: /([^\s{](?s:.*))?/"]


class Mistral(MarkedFormat):
    marker = "[TOOL_CALLS]"
    syntax = CallSyntax(
        r"(?<!\s)\s*\[TOOL_CALLS\]\s*"
        rf"(?:\[\s*{_HEAD}|{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*(?=\{{))",
        _TAIL,
        again=rf"\s*,\s*{_HEAD}",
        closing=r"\s*\]",
    )
    id_format = "{:.9}"  # the templates refuse others

    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:
        if "[ARGS]" not in self._template:
            start = f'start: " "? "[" {_one_or("object", several, ", ")} "]"'
            return "\n".join([start, *_objects(tools, "arguments")])
        arguments = marker_rule("[ARGS]", added_tokens)
        calls = [f"{json.dumps(tool.name)} {arguments} {_arguments(tool)}" for tool in tools]
        more = f" ({self.begin(added_tokens)} object)*" if several else ""
        return "\n".join([f"start: object{more}", *_any_of(tools, calls)])


TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "mistral": Mistral,
    "llama3_json": Llama3Json,
}


def _one_or(rule: str, several: bool, separator: str) -> str:
    return f"{rule} ({json.dumps(separator)} {rule})*" if several else rule


def _objects(tools: Sequence[Function], key: str) -> list[str]:
    """A rule `object`: a call as a JSON object."""
    return _any_of(tools, [_object(tool, key) for tool in tools])


def _object(tool: Function, key: str) -> str:
    head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
    return f'{head} {_arguments(tool)} "}}"'


def _arguments(tool: Function) -> str:
    schema = {**tool.schema_of_arguments, "x-guidance": _COMPACT}
    with tool.named_in_refusals():
        return f"%json {readable_schema(json.dumps(schema))}"


def _any_of(tools: Sequence[Function], bodies: list[str]) -> list[str]:
    rules = [f"object_{index}" for index in range(len(tools))]
    lines = [
        f"{rule}: {body}{TOOL_NOTE}{tool.name!r}"
        for rule, body, tool in zip(rules, bodies, tools, strict=True)
    ]
    return [f"object: {' | '.join(rules)}", *lines]
