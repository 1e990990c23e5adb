r"""How models spell calls of tools: what is read as a call, and the grammar that holds an answer to it.

    hermes       <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>       Qwen2.5, Qwen3, Hermes
    llama3_json  {"name": "f", "parameters": {…}}; …                              Llama 3.1 and later
    mistral      [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …], or            Mistral
                 [TOOL_CALLS]f[ARGS]{…} where the template has it so

A model is trained on one of them, which shows in its chat template.
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
from minisgl.server.parsing.grammar_rules import Markers, marker, nested, text_without
from minisgl.server.parsing.tool_calls import CallReader, Spelling

_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_NAME = r"(?P<name>[\w.-]{1,64})"
_HEAD = rf'\{{\s*{_TYPE}(?:"name"\s*:\s*"{_NAME}"\s*,\s*)?"(?:arguments|parameters)"\s*:\s*(?=\{{)'
_TAIL = rf'\s*(?:,\s*(?:"name"\s*:\s*"{_NAME}"|"(?:id|type)"\s*:\s*"[^"\\]*")\s*)*\}}'
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolFormat(ABC):
    """One spelling, as the model with this chat template has it."""

    spelling: ClassVar[Spelling]
    id_format: ClassVar[str] = "call_{:.24}"

    def __init__(self, template: str) -> None:
        self._template = template

    @staticmethod
    @abstractmethod
    def suits(template: str) -> bool:
        """Whether a chat template spells calls so."""

    @abstractmethod
    def calls(self, tools: Sequence[Function], markers: Markers, *, several: bool) -> str:
        """In Lark: one call, or with `several` any number of them from one up."""

    @abstractmethod
    def text(self, markers: Markers) -> str:
        """In Lark, the body of a terminal: what may come before calls or instead of them.

        Raises:
            InvalidRequest: they cannot be told apart.
        """

    def grammar(self, use: ToolUse, markers: Markers, answer: Grammar | None = None) -> Grammar:
        """What an answer may be if it is held to the tools' schemas.

        Args:
            answer: what it has to be if it calls nothing; None: any text.

        Raises:
            InvalidRequest: with a free choice, text cannot be told from calls.
        """
        calls = Grammar("lark", self.calls(use.callable, markers, several=use.allows_several))
        if use.must_call:
            return calls
        if answer:
            return Grammar(
                "lark", f"start: answer | calls\nanswer: {nested(answer)}\ncalls: {nested(calls)}"
            )
        return Grammar(
            "lark", f"start: TEXT calls?\nTEXT: {self.text(markers)}\ncalls: {nested(calls)}"
        )

    def make_reader(self, use: ToolUse, *, eager: bool) -> CallReader:
        return CallReader(self.spelling, use, self.new_id, eager=eager)

    def new_id(self) -> str:
        return self.id_format.format(uuid.uuid4().hex)


class Hermes(ToolFormat):
    spelling = Spelling(rf"(?<!\s)\s*<tool_call>\s*{_HEAD}", _TAIL, closing=r"\s*</tool_call>")

    @staticmethod
    def suits(template: str) -> bool:
        others = ("<function=", "<arg_key>")  # the same marker around another spelling
        return "<tool_call>" in template and not any(other in template for other in others)

    def calls(self, tools: Sequence[Function], markers: Markers, *, several: bool) -> str:
        begin, end = marker("<tool_call>", markers), marker("</tool_call>", markers)
        start = f"start: {_one_or('call', several, chr(10))}"
        return "\n".join(
            [start, rf'call: {begin} "\n" object "\n" {end}', *_objects(tools, "arguments")]
        )

    def text(self, markers: Markers) -> str:
        return _text_before("<tool_call>", markers)


class Llama3Json(ToolFormat):
    spelling = Spelling(
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

    def calls(self, tools: Sequence[Function], markers: Markers, *, several: bool) -> str:  # noqa: ARG002
        return "\n".join(
            [f"start: {_one_or('object', several, '; ')}", *_objects(tools, "parameters")]
        )

    def text(self, markers: Markers) -> str:  # noqa: ARG002
        return r"/([^\s{](?s:.*))?/"


class Mistral(ToolFormat):
    spelling = Spelling(
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

    def calls(self, tools: Sequence[Function], markers: Markers, *, several: bool) -> str:
        begin = marker("[TOOL_CALLS]", markers)
        if "[ARGS]" not in self._template:
            call = f'start: {begin} " "? "[" {_one_or("object", several, ", ")} "]"'
            return "\n".join([call, *_objects(tools, "arguments")])
        arguments = marker("[ARGS]", markers)
        calls = [
            f"{begin} {json.dumps(tool.name)} {arguments} {_arguments(tool)}" for tool in tools
        ]
        return "\n".join([f"start: object{'+' if several else ''}", *_any_of(calls)])

    def text(self, markers: Markers) -> str:
        return _text_before("[TOOL_CALLS]", markers)


FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "mistral": Mistral,
    "llama3_json": Llama3Json,
}


def choose_format(template: str | None, name: str | None) -> ToolFormat | None:
    """The one of that name, else the one that the template has, if it has one."""
    kinds = (
        [FORMATS[name]]
        if name
        else [kind for kind in FORMATS.values() if kind.suits(template or "")]
    )
    return kinds[0](template or "") if kinds else None


def _one_or(rule: str, several: bool, separator: str) -> str:
    return f"{rule} ({json.dumps(separator)} {rule})*" if several else rule


def _objects(tools: Sequence[Function], key: str) -> list[str]:
    """A rule `object`: a call as a JSON object."""
    heads = (json.dumps(f'{{"name": "{tool.name}", "{key}": ') for tool in tools)
    return _any_of(
        [f'{head} {_arguments(tool)} "}}"' for head, tool in zip(heads, tools, strict=True)]
    )


def _arguments(tool: Function) -> str:
    return f"%json {json.dumps({**tool.schema_of_arguments, 'x-guidance': _COMPACT})}"


def _any_of(bodies: list[str]) -> list[str]:
    rules = {f"object_{index}": body for index, body in enumerate(bodies)}
    return [f"object: {' | '.join(rules)}", *(f"{name}: {body}" for name, body in rules.items())]


def _text_before(text: str, markers: Markers) -> str:
    if text not in markers:
        message = f"'strict' with tool_choice 'auto' needs a model that has {text} as a token; send 'required'"
        raise InvalidRequest(message, param="tools")
    return text_without(text)
