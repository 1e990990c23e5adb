"""Tools of POST /v1/responses: functions in their flat form, alone or in a namespace.

A model has no namespaces. It is shown the function `f` of the namespace `n` as `n.f`, and calls it
so; requests and answers have the two names apart.
Reference: https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Tag, ValidationInfo, model_validator

from minisgl.server.requests.tools import MAX_TOOLS, Function, ToolName
from minisgl.server.requests.validation import AtMost, RequestContext, RequestModel, ValidText


def name_for_model(namespace: str | None, name: str) -> str:
    """The name by which a model calls a function."""
    return name if namespace is None else f"{namespace}.{name}"


class _ToolOfResponses(RequestModel):
    @property
    @abstractmethod
    def functions(self) -> list[Function]:
        """What the model may call, by the names that it is shown."""

    @property
    def namespaced_names(self) -> dict[str, dict[str, str]]:
        """The two names of a function in a namespace, by the name that the model is shown."""
        return {}


class _FunctionType(RequestModel):
    type: Literal["function"]


class FunctionTool(Function, _FunctionType, _ToolOfResponses):
    """A tool in its flat form.

    `type` is checked first, so a tool of another type is refused by its type.
    """

    @property
    def functions(self) -> list[Function]:
        return [self]


class ChosenFunction(_FunctionType):
    name: ToolName


class NamespaceTool(_ToolOfResponses):
    """Functions with a description in common, which stands before that of the first."""

    type: Literal["namespace"]
    name: ToolName
    description: ValidText | None = None
    tools: Annotated[list[FunctionTool], AtMost(MAX_TOOLS)]

    @property
    def functions(self) -> list[Function]:
        functions: list[Function] = []
        description = self.description
        for tool in self.tools:
            texts = [text for text in (description, tool.description) if text]
            shown = {
                "name": name_for_model(self.name, tool.name),
                "description": "\n\n".join(texts) or None,
            }
            functions.append(tool.model_copy(update=shown))
            description = None
        return functions

    @property
    def namespaced_names(self) -> dict[str, dict[str, str]]:
        return {
            name_for_model(self.name, tool.name): {"name": tool.name, "namespace": self.name}
            for tool in self.tools
        }


class OfflineSearchTool(_ToolOfResponses):
    """A search of an index at OpenAI, which Codex always offers.

    A model can do without it, so it is left out. A search of the web is refused.
    """

    type: Literal["web_search"]
    external_web_access: Literal[False]

    @property
    def functions(self) -> list[Function]:
        return []

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> Self:
        context: RequestContext | None = info.context
        if context:
            context.ignore("ResponsesRequest", ["tools.web_search"])
        return self


def _kind(tool: Any) -> str:
    """Which tool it is. One of an unknown type is no function, and refused as such."""
    if isinstance(tool, OfflineSearchTool | NamespaceTool):
        return tool.type
    if not isinstance(tool, dict):
        return "function"
    if tool.get("type") == "web_search" and tool.get("external_web_access") is False:
        return "web_search"
    return "namespace" if tool.get("type") == "namespace" else "function"


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OfflineSearchTool, Tag("web_search")],
    Discriminator(_kind),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenFunction, Tag("function")],
    Discriminator(lambda choice: "mode" if isinstance(choice, str) else "function"),
]
