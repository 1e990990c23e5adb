"""Tools as requests offer them, and which of them an answer may or must call.

Does not know how a model writes a call; that is in `parsing/tool_formats.py`.
Reference: https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from minisgl.errors import InvalidRequest
from minisgl.server.requests.closed_schemas import close_objects
from minisgl.server.requests.validation import (
    RequestModel,
    Schema,
    ValidText,
    check_depth,
    check_packable,
)

MAX_TOOLS = 128
MAX_TOOL_NAME = 128  # characters, as in Anthropic's API; OpenAI's has 64


def _check_is_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError('arguments are an object: leave the type out or send "object"')
    return schema


ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_TOOL_NAME}}}$")]
Parameters = Annotated[Schema, AfterValidator(_check_is_object)]


class Function(RequestModel):
    """The name, description and parameters of a tool."""

    name: ToolName
    description: ValidText | None = None
    parameters: Parameters | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object", **(self.parameters or {})}

    def close_schema(self, *, only_strict: bool) -> Function:
        """The function without arguments that its schema does not list, unless that allows them.

        Args:
            only_strict: whether functions that are not strict stay as they are.
        """
        if only_strict and not self.strict:
            return self
        with self.named_in_refusals():
            schema = close_objects(self.schema_of_arguments, free_form=bool(self.strict))
        return self.model_copy(update={"parameters": schema})

    @contextmanager
    def named_in_refusals(self) -> Iterator[None]:
        """Name the tool in the refusal of a schema that cannot become a grammar."""
        try:
            yield
        except InvalidRequest as error:
            raise InvalidRequest(f"the tool {self.name!r}: {error}", param="tools") from None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: parameters are always there."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    name: ToolName


class NamedTool(RequestModel):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class CalledFunction(RequestModel):
    name: ValidText
    arguments: ValidText


class ToolCall(RequestModel):
    """A call of an earlier answer."""

    id: ValidText
    type: Literal["function"] | None = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments = _decode_arguments(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _decode_arguments(text: str) -> dict[str, Any] | str:
    """The object that templates expect, or the text if it is not an object in JSON."""
    try:
        value = check_packable(check_depth(json.loads(text)))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and which of them an answer may or must call.

    Attributes:
        choice: "required" means at least one call and no content.
        named_tool: the one tool that has to be called, once.
        is_parallel: whether there may be several calls in one answer.

    Raises:
        InvalidRequest: two tools have one name, or a tool that is not offered has to be called.
    """

    tools: Sequence[Function] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    named_tool: str | None = None
    is_parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise InvalidRequest(f"two tools are named {min(twice)!r}", param="tools")
        if len(names) > MAX_TOOLS:
            raise InvalidRequest(f"there may be {MAX_TOOLS} tools, got {len(names)}", param="tools")
        if self.named_tool is not None and self.named_tool not in names:
            raise InvalidRequest(
                f"tool_choice names {self.named_tool!r}, which is not among the tools",
                param="tool_choice",
            )
        if self.choice == "required" and not names:
            raise InvalidRequest(
                "tool_choice asks for a call, but there are no tools", param="tool_choice"
            )

    @property
    def offered_tools(self) -> Sequence[Function]:
        """The tools that the chat template shows to the model."""
        return () if self.choice == "none" else self.tools

    @property
    def callable_tools(self) -> list[Function]:
        """The tools that an answer may call."""
        return [tool for tool in self.offered_tools if self.named_tool in (None, tool.name)]

    def close_schemas(self, *, only_strict: bool) -> Self:
        """The same with each tool changed by `Function.close_schema`."""
        return replace(
            self, tools=[tool.close_schema(only_strict=only_strict) for tool in self.tools]
        )

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar makes calls follow the tools' schemas."""
        return self.must_call or any(tool.strict for tool in self.offered_tools)

    @property
    def must_call(self) -> bool:
        return self.named_tool is not None or self.choice == "required"

    @property
    def allows_several_calls(self) -> bool:
        return self.is_parallel and self.named_tool is None

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.offered_tools]
