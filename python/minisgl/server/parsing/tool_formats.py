r"""The formats of tool calls: what is parsed as a call, and the grammar that enforces it.

    hermes       <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>       Qwen2.5, Qwen3,
    Hermes llama3_json  {"name": "f", "parameters": {…}}; …                              Llama 3.1
    and later mistral      [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …], or            Mistral
    [TOOL_CALLS]f[ARGS]{…} where the template has it so

A model is trained on one of them, which its chat template shows.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.server.openai.tools import Function, ToolUse
from minisgl.server.parsing.grammar_rules import (
    AddedTokens,
    marker_rule,
    nested_grammar,
    text_without,
)
from minisgl.server.parsing.tool_calls import CallSyntax, ToolCallParser

_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_NAME = r"(?P<name>[\w.-]{1,64})"
_HEAD = rf'\{{\s*{_TYPE}(?:"name"\s*:\s*"{_NAME}"\s*,\s*)?"(?:arguments|parameters)"\s*:\s*(?=\{{)'
_TAIL = rf'\s*(?:,\s*(?:"name"\s*:\s*"{_NAME}"|"(?:id|type)"\s*:\s*"[^"\\]*")\s*)*\}}'
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolFormat(ABC):
    """One format, as the model with this chat template has it."""

    syntax: ClassVar[CallSyntax]
    id_format: ClassVar[str] = "call_{:.24}"

    def __init__(self, template: str) -> None:
        self._template = template

    @staticmethod
    @abstractmethod
    def suits(template: str) -> bool:
        """Whether a chat template has calls in this format."""

    @abstractmethod
    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:
        """A Lark grammar of one call, or with `several` of one or more."""

    @abstractmethod
    def text(self, added_tokens: AddedTokens) -> str:
        """The body of a Lark terminal: text that may come before calls or instead of them.

        Raises:
            InvalidRequest: such text cannot be told apart from calls.
        """

    def grammar(
        self, use: ToolUse, added_tokens: AddedTokens, answer: Grammar | None = None
    ) -> Grammar:
        """A grammar of answers whose calls follow the tools' schemas.

        Args:
            answer: what an answer without calls has to match; None means any text.

        Raises:
            InvalidRequest: the answer need not call, and text cannot be told apart from calls.
        """
        calls = Grammar(
            "lark", self.calls(use.callable_tools, added_tokens, several=use.allows_several_calls)
        )
        if use.must_call:
            return calls
        if answer:
            rules = ["start: answer | calls", f"answer: {nested_grammar(answer)}"]
        else:
            rules = ["start: TEXT calls?", f"TEXT: {self.text(added_tokens)}"]
        rules.append(f"calls: {nested_grammar(calls)}")
        return Grammar("lark", "\n".join(rules))

    def make_parser(self, use: ToolUse, *, eager: bool) -> ToolCallParser:
        return ToolCallParser(self.syntax, use, self.new_id, eager=eager)

    def new_id(self) -> str:
        return self.id_format.format(uuid.uuid4().hex)


class Hermes(ToolFormat):
    syntax = CallSyntax(rf"(?<!\s)\s*<tool_call>\s*{_HEAD}", _TAIL, closing=r"\s*</tool_call>")

    @staticmethod
    def suits(template: str) -> bool:
        others = ("<function=", "<arg_key>")  # other formats with this marker
        return "<tool_call>" in template and not any(other in template for other in others)

    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:
        begin = marker_rule("<tool_call>", added_tokens)
        end = marker_rule("</tool_call>", added_tokens)
        start = f"start: {_one_or('call', several, chr(10))}"
        call = rf'call: {begin} "\n" object "\n" {end}'
        return "\n".join([start, call, *_objects(tools, "arguments")])

    def text(self, added_tokens: AddedTokens) -> str:
        return _text_before("<tool_call>", added_tokens)


class Llama3Json(ToolFormat):
    syntax = CallSyntax(
        rf"(?<!\s)\s*<\|python_tag\|>\s*{_HEAD}",
        _TAIL,
        again=rf"[\s;]*(?:<\|python_tag\|>\s*)?{_HEAD}",
        opens_answer=True,
    )

    @staticmethod
    def suits(template: str) -> bool:
        return (
            "<|python_tag|>" in template
            or re.search(r'name\\?": function name, \\?"param', template) is not None
        )

    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:  # noqa: ARG002
        start = f"start: {_one_or('object', several, '; ')}"
        return "\n".join([start, *_objects(tools, "parameters")])

    def text(self, added_tokens: AddedTokens) -> str:  # noqa: ARG002
        return r"/([^\s{](?s:.*))?/"


class Mistral(ToolFormat):
    syntax = CallSyntax(
        r"(?<!\s)\s*\[TOOL_CALLS\]\s*"
        rf"(?:\[\s*{_HEAD}|{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*(?=\{{))",
        _TAIL,
        again=rf"\s*,\s*{_HEAD}",
        closing=r"\s*\]",
    )
    id_format = "{:.9}"  # the templates refuse others

    @staticmethod
    def suits(template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def calls(self, tools: Sequence[Function], added_tokens: AddedTokens, *, several: bool) -> str:
        begin = marker_rule("[TOOL_CALLS]", added_tokens)
        if "[ARGS]" not in self._template:
            start = f'start: {begin} " "? "[" {_one_or("object", several, ", ")} "]"'
            return "\n".join([start, *_objects(tools, "arguments")])
        arguments = marker_rule("[ARGS]", added_tokens)
        calls = [
            f"{begin} {json.dumps(tool.name)} {arguments} {_arguments(tool)}" for tool in tools
        ]
        start = "start: object+" if several else "start: object"
        return "\n".join([start, *_any_of(calls)])

    def text(self, added_tokens: AddedTokens) -> str:
        return _text_before("[TOOL_CALLS]", added_tokens)


TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "mistral": Mistral,
    "llama3_json": Llama3Json,
}


def choose_format(template: str | None, name: str | None) -> ToolFormat | None:
    """The format of that name, else the one that the template has, if it has one."""
    template = template or ""
    if name:
        return TOOL_FORMATS[name](template)
    for tool_format in TOOL_FORMATS.values():
        if tool_format.suits(template):
            return tool_format(template)
    return None


def _one_or(rule: str, several: bool, separator: str) -> str:
    return f"{rule} ({json.dumps(separator)} {rule})*" if several else rule


def _objects(tools: Sequence[Function], key: str) -> list[str]:
    """A rule `object`: a call as a JSON object."""
    return _any_of([_object(tool, key) for tool in tools])


def _object(tool: Function, key: str) -> str:
    head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
    return f'{head} {_arguments(tool)} "}}"'


def _arguments(tool: Function) -> str:
    schema = {**tool.schema_of_arguments, "x-guidance": _COMPACT}
    return f"%json {json.dumps(schema)}"


def _any_of(bodies: list[str]) -> list[str]:
    rules = {f"object_{index}": body for index, body in enumerate(bodies)}
    return [f"object: {' | '.join(rules)}", *(f"{name}: {body}" for name, body in rules.items())]


def _text_before(text: str, added_tokens: AddedTokens) -> str:
    if text not in added_tokens:
        raise InvalidRequest(
            f"'strict' with tool_choice 'auto' needs a model that has {text} as a token; "
            "send 'required'",
            param="tools",
        )
    return text_without(text)
