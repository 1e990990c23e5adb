"""POST /v1/responses as it comes in, and the conversation that it is. Nothing is kept from one request to the next.

Items of the input become messages of a chat, flat tools become chat's, so that all routes ask the template and the
engine alike. Reference: https://platform.openai.com/docs/api-reference/responses. Next to read: `responses_answer.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.message import ChatMessage, Conversation, Prompt
from minisgl.server.openai.generation_request import ConversationRequest
from minisgl.server.openai.structured_output import PlainFormat, TextFormat
from minisgl.server.openai.tools import CalledFunction, Function, ToolCall, ToolName
from minisgl.server.openai.validation import Limit, OfStream, Only, Strict, TopLogprobs, ValidText


def _turn(messages: list[ChatMessage], *taken: str) -> ChatMessage:
    """The assistant's turn to go on with: the last message, unless it is another's or has one of these already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


class Part(Strict):
    """Text. What an answer has beside it may come back, and is not looked at."""

    type: Literal["input_text", "output_text"]
    text: ValidText
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ReasoningPart(Strict):
    type: Literal["reasoning_text"]
    text: ValidText


Text = Annotated[
    list[Part],
    BeforeValidator(
        lambda text: [{"type": "input_text", "text": text}] if isinstance(text, str) else text,
        json_schema_input_type=str | list[Part],
    ),
]


def _joined(parts: list[Part] | list[ReasoningPart]) -> str:
    return "".join(part.text for part in parts)


class _Item(Strict):
    id: str | None = None
    status: str | None = None

    @abstractmethod
    def add_to(self, messages: list[ChatMessage]) -> None:
        """Say it in a chat. What an answer consists of is one turn there: reasoning, text and calls."""


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    phase: None = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        if self.role == "assistant":
            _turn(messages, "content", "tool_calls")["content"] = _joined(self.content)
        else:
            role = "system" if self.role == "developer" else self.role
            messages.append({"role": role, "content": _joined(self.content)})


class ReasoningItem(_Item):
    """It goes to the template as `reasoning_content`; many leave it out of what was said before the last question."""

    type: Literal["reasoning"]
    content: list[ReasoningPart]
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: None = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        turn = _turn(messages, "reasoning_content", "content", "tool_calls")
        turn["reasoning_content"] = _joined(self.content)


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: ValidText
    name: ValidText
    arguments: ValidText

    def add_to(self, messages: list[ChatMessage]) -> None:
        call = ToolCall(
            id=self.call_id,
            type="function",
            function=CalledFunction(name=self.name, arguments=self.arguments),
        )
        _turn(messages).setdefault("tool_calls", []).append(call.for_template())


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: ValidText
    output: Text

    def add_to(self, messages: list[ChatMessage]) -> None:
        messages.append(
            {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}
        )


def _type_of(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_type_of),
]
Input = Annotated[
    list[Item],
    Field(min_length=1),
    BeforeValidator(
        lambda text: [{"role": "user", "content": text}] if isinstance(text, str) else text,
        json_schema_input_type=str | Annotated[list[Item], Field(min_length=1)],
    ),
]


class TextOptions(Strict):
    format: TextFormat = PlainFormat()
    verbosity: Annotated[Any, Only("medium")] = None


class _OfFunction(Strict):
    type: Literal["function"]


class FunctionTool(Function, _OfFunction):
    """A tool in its flat form; of another, the type is refused before all else."""


class ChosenFunction(_OfFunction):
    name: ToolName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[ChosenFunction, Tag("function")],
    Discriminator(lambda choice: "mode" if isinstance(choice, str) else "function"),
]


class ReasoningOptions(Strict):
    """How much to think is the model's own affair."""

    effort: Annotated[Any, Only()] = None
    summary: Annotated[Any, Only()] = None
    generate_summary: Annotated[Any, Only()] = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool | None = None


class ResponsesRequest(ConversationRequest):
    """POST /v1/responses. There is one answer, whose items may stand in the input of the next request."""

    prompt_field: ClassVar[str] = "input"

    model: str
    input: Input
    instructions: ValidText | None = None
    max_output_tokens: Limit | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: OfStream[ResponsesStreamOptions] | None = None
    access_programs: Annotated[Any, Only()] = None
    background: Annotated[Any, Only(False)] = None
    background_options: Annotated[Any, Only()] = None
    context_management: Annotated[Any, Only([])] = None
    conversation: Annotated[Any, Only()] = None
    image: Annotated[Any, Only()] = None
    max_tool_calls: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    previous_response_id: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only({})] = None
    truncation: Annotated[Any, Only("disabled")] = None

    def prompts(self) -> list[Prompt]:
        return [
            Conversation(
                self.messages(), {}, self.chat_template_kwargs or {}, self.tool_use.for_template()
            )
        ]

    def messages(self) -> list[ChatMessage]:
        """Instructions and input as a chat."""
        messages = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        for item in self.input:
            item.add_to(messages)
        return messages

    @property
    def offered(self) -> list[FunctionTool]:
        return self.tools or []

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.include:
            message = "top_logprobs needs include to have message.output_text.logprobs"
            raise InvalidRequest(message, param="top_logprobs")
        return (self.top_logprobs or 0) if self.include else None

    def _grammars(self) -> dict[str, Grammar | None]:
        return {
            "text": None if self.text is None else self.text.format.grammar(),
            **super()._grammars(),
        }
