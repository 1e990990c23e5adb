"""The turns of a conversation as requests have them, and as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from minisgl.message import ChatMessage
from minisgl.server.openai.tools import ToolCall
from minisgl.server.openai.validation import Strict, ValidText


class TextPart(Strict):
    type: Literal["text"]
    text: ValidText


class Message(Strict):
    """One turn. Content may come in text parts, which are joined; an assistant that called tools needs none.

    An answer may come back as a client has it, with nulls for what it did not say.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ValidText | list[TextPart] | None = None
    name: ValidText | None = None
    reasoning_content: ValidText | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: ValidText | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, turn: Any) -> Any:
        return (
            {name: value for name, value in turn.items() if value is not None}
            if isinstance(turn, dict)
            else turn
        )

    @model_validator(mode="after")
    def _suits_its_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("there is no content")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError(
                f"only an assistant has tool_calls and reasoning_content, not a {self.role}"
            )
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a tool, and nobody else, has a tool_call_id")
        return self

    def plain(self) -> ChatMessage:
        """For the template; null fields are absent, but content is always text."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        others = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        return {
            "role": role,
            "content": text,
            **{key: it for key, it in others.items() if it is not None},
        }
