"""The turns of a conversation, as requests have them and as chat templates expect them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import model_validator

from minisgl.message import ChatMessage
from minisgl.server.requests.tools import ToolCall
from minisgl.server.requests.unsupported import EmptyListOnly
from minisgl.server.requests.validation import (
    FITS_CONTEXT,
    NeutralOnly,
    RequestModel,
    ValidText,
)


def refusal_as_text(part: Any) -> Any:
    """A part of a turn, with its text as `text` also where it is a refusal."""
    if not isinstance(part, dict) or part.get("type") != "refusal" or "refusal" not in part:
        return part
    others = {name: value for name, value in part.items() if name != "refusal"}
    return {**others, "text": part["refusal"]}


class TextPart(RequestModel):
    """Text. It may also be the `refusal` of a part of that type, as in OpenAI's answers."""

    type: Literal["text", "refusal"]
    text: ValidText

    read_refusal = model_validator(mode="before")(refusal_as_text)


_ByPrefill: TypeAlias = Annotated[Any, NeutralOnly(False, instead="continue_final_message")]


class Message(RequestModel):
    """One turn. Content may come in text parts, which are joined.

    An assistant's turn with tool calls, reasoning or a refusal needs no content.

    A client may send an answer back unchanged, from this server or another: absent fields may be
    null, and further fields are ignored.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ValidText | Annotated[list[TextPart], FITS_CONTEXT] | None = None
    name: ValidText | None = None
    refusal: ValidText | None = None
    reasoning_content: ValidText | None = None
    reasoning: ValidText | None = None
    tool_calls: Annotated[list[ToolCall], FITS_CONTEXT] | None = None
    tool_call_id: ValidText | None = None

    audio: Annotated[Any, NeutralOnly(instead="its transcript as content")] = None
    function_call: Annotated[Any, NeutralOnly(instead="tool_calls")] = None
    images: EmptyListOnly = None
    partial: _ByPrefill = None
    prefix: _ByPrefill = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        return {name: value for name, value in turn.items() if value is not None}

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is not None and self.refusal is not None:
            raise ValueError("send either content or refusal")
        if None not in (self.reasoning, self.reasoning_content) and (
            self.reasoning != self.reasoning_content
        ):
            raise ValueError("reasoning and reasoning_content differ; send one of them")
        if not (self._has_text or self.tool_calls):
            raise ValueError("there is no content")
        return self

    @property
    def _has_text(self) -> bool:
        return any(text is not None for text in (self.content, self.refusal, self._thoughts))

    @property
    def _thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
                if getattr(self, name):
                    raise ValueError(f"only an assistant has {name}, not a {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is required of a tool")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("a tool, and nobody else, has a tool_call_id")
        return self

    def for_template(self) -> ChatMessage:
        """As chat templates expect it: null fields are absent, but content is always text."""
        message: ChatMessage = {"role": self.role, "content": self._text()}
        if self.role == "developer":
            message["role"] = "system"
        if self.name is not None:
            message["name"] = self.name
        if self._thoughts is not None:
            message["reasoning_content"] = self._thoughts
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""
