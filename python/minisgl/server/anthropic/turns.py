"""The turns of a conversation in Anthropic's API, and the messages of a chat that they become.

Results of tools become messages of their own, reasoning and calls become fields of the assistant's
message. Next to read: `messages_request.py`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from minisgl.message import ChatMessage
from minisgl.server.requests.tools import CalledFunction, ToolCall
from minisgl.server.requests.validation import (
    FITS_CONTEXT,
    NeutralOnly,
    RequestModel,
    ValidText,
    check_finite,
    null_is,
)


class TextBlock(RequestModel):
    type: Literal["text"]
    text: ValidText
    cache_control: Any = None
    citations: Annotated[Any, NeutralOnly([])] = None


def _text_to_blocks(text: Any) -> Any:
    return [{"type": "text", "text": text}] if isinstance(text, str) else text


TextBlocks = Annotated[
    list[TextBlock],
    FITS_CONTEXT,
    BeforeValidator(_text_to_blocks, json_schema_input_type=str | list[TextBlock]),
]


def text_of(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer. Its signature is not checked: this server makes none."""

    type: Literal["thinking"]
    thinking: ValidText
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    """Reasoning that only Anthropic's servers can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestModel):
    """A call of an earlier answer. A model may have written any object of JSON as its input."""

    type: Literal["tool_use"]
    id: ValidText
    name: ValidText
    input: Annotated[dict[str, Any], AfterValidator(check_finite)]
    cache_control: Any = None


class ToolResultBlock(RequestModel):
    """The result of a tool. `is_error` is for the client; the model reads the text."""

    type: Literal["tool_result"]
    tool_use_id: ValidText
    content: Annotated[TextBlocks, null_is([], TextBlocks)] = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: Any = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserTurn(RequestModel):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock],
        FITS_CONTEXT,
        BeforeValidator(_text_to_blocks, json_schema_input_type=str | list[UserBlock]),
    ]

    def add_to(self, messages: list[ChatMessage]) -> None:
        """Add a message for each result, and one for the texts that follow each other.

        A turn without blocks is a message without text.
        """
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            _add_user_texts(messages, texts)
            result = text_of(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        if not self.content:
            texts.append("")
        _add_user_texts(messages, texts)


def _add_user_texts(messages: list[ChatMessage], texts: list[str]) -> None:
    if texts:
        messages.append({"role": "user", "content": "".join(texts)})
        texts.clear()


class SystemTurn(RequestModel):
    """Instructions in the middle of a conversation, which stay where they are."""

    role: Literal["system"]
    content: TextBlocks

    def add_to(self, messages: list[ChatMessage]) -> None:
        """Add one message with the text."""
        messages.append({"role": "system", "content": text_of(self.content)})


class AssistantTurn(RequestModel):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        FITS_CONTEXT,
        BeforeValidator(_text_to_blocks, json_schema_input_type=str | list[AssistantBlock]),
    ]

    def add_to(self, messages: list[ChatMessage]) -> None:
        """Add one message with the text, the reasoning and the calls."""
        message: ChatMessage = {"role": "assistant", "content": ""}
        for block in self.content:
            match block:
                case TextBlock(text=text):
                    message["content"] += text
                case ThinkingBlock(thinking=reasoning) if reasoning:
                    message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
                case ToolUseBlock():
                    message.setdefault("tool_calls", []).append(_call(block).for_template())
        messages.append(message)


def _call(block: ToolUseBlock) -> ToolCall:
    text = json.dumps(block.input, ensure_ascii=False)
    arguments = text.encode(errors="backslashreplace").decode()  # half a surrogate pair
    function = CalledFunction(name=block.name, arguments=arguments)
    return ToolCall(id=block.id, type="function", function=function)


Turn = Annotated[UserTurn | SystemTurn | AssistantTurn, Field(discriminator="role")]
