"""The turns of a conversation, as requests have them and as chat templates expect them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from minisgl.message import ChatMessage
from minisgl.server.openai.tools import ToolCall
from minisgl.server.openai.validation import FITS_CONTEXT, RequestModel, ValidText

PLACEHOLDER_TURNS = [{"role": "user", "content": "-"}]


class TextPart(RequestModel):
    type: Literal["text"]
    text: ValidText


class Message(RequestModel):
    """One turn. Content may come in text parts, which are joined.

    An assistant's turn with tool calls needs no content.

    A client may send an answer back as it got it, with null in fields that are absent.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ValidText | Annotated[list[TextPart], FITS_CONTEXT] | None = None
    name: ValidText | None = None
    reasoning_content: ValidText | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1), FITS_CONTEXT] | None = None
    tool_call_id: ValidText | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        return {name: value for name, value in turn.items() if value is not None}

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("there is no content")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError(
                f"only an assistant has tool_calls and reasoning_content, not a {self.role}"
            )
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a tool, and nobody else, has a tool_call_id")
        return self

    def for_template(self) -> ChatMessage:
        """As chat templates expect it: null fields are absent, but content is always text."""
        message: ChatMessage = {"role": self.role, "content": self._text()}
        if self.role == "developer":
            message["role"] = "system"
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""
