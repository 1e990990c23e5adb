"""POST /v1/responses: the request, and the conversation that it becomes.

The server keeps nothing between requests.

Items of the input become messages of a chat, and flat tools become those of a chat. Reference:
https://platform.openai.com/docs/api-reference/responses. Next to read: `responses_items.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from minisgl.core import Grammar
from minisgl.errors import InvalidRequest
from minisgl.message import ChatMessage, Conversation, Prompt
from minisgl.server.openai.messages import refusal_as_text
from minisgl.server.openai.responses_tools import ResponsesTool, ToolChoice, name_for_model
from minisgl.server.requests.generation_request import ConversationRequest
from minisgl.server.requests.structured_output import PlainFormat, TextFormat, refusals_name
from minisgl.server.requests.tools import MAX_TOOLS, CalledFunction, Function, ToolCall
from minisgl.server.requests.unsupported import (
    EmptyListOnly,
    EmptyObjectOnly,
    FalseOnly,
    OneOnly,
    Refused,
)
from minisgl.server.requests.validation import (
    FITS_CONTEXT,
    AtMost,
    NeutralOnly,
    NumTopLogprobs,
    RequestModel,
    StreamingOnly,
    TokenLimit,
    ValidText,
    null_is,
)

MAX_INCLUDED = 16
_LOGPROBS = "message.output_text.logprobs"
# Nothing is encrypted here, as nothing is stored: clients that ask for it get reasoning as text.
_Included: TypeAlias = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


def _assistant_turn(messages: list[ChatMessage], *absent: str) -> ChatMessage:
    """The turn of the assistant that an item belongs to.

    It is the last message, or a new one if that is not the assistant's or has one of these fields
    already.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in absent):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


class Part(RequestModel):
    """Text, or the `refusal` of a part of that type, as in OpenAI's answers.

    Further fields, which a client may send back from an answer, are ignored.
    """

    type: Literal["input_text", "output_text", "refusal"]
    text: ValidText
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    read_refusal = model_validator(mode="before")(refusal_as_text)


class ReasoningPart(RequestModel):
    type: Literal["reasoning_text"]
    text: ValidText


def _text_to_parts(text: Any) -> Any:
    return [{"type": "input_text", "text": text}] if isinstance(text, str) else text


Text = Annotated[
    list[Part],
    FITS_CONTEXT,
    BeforeValidator(_text_to_parts, json_schema_input_type=str | list[Part]),
]


def _join(parts: list[Part] | list[ReasoningPart]) -> str:
    return "".join(part.text for part in parts)


class _Item(RequestModel):
    id: str | None = None
    status: str | None = None

    @abstractmethod
    def add_to(self, messages: list[ChatMessage]) -> None:
        """Add the item to a chat. Reasoning, text and calls of one answer are one turn there."""


class MessageItem(_Item):
    """A turn. Its phase says what an answer was for; templates have no place for it."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    phase: ValidText | None = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        if self.role == "assistant":
            turn = _assistant_turn(messages, "content", "tool_calls")
            turn["content"] = _join(self.content)
        else:
            role = "system" if self.role == "developer" else self.role
            messages.append({"role": role, "content": _join(self.content)})


class ReasoningItem(_Item):
    """Its text goes to the chat template as `reasoning_content`.

    Many templates drop it before the last question. Summaries and encrypted reasoning are not
    read.
    """

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], FITS_CONTEXT] | None = None
    summary: Annotated[list[Any], AtMost(MAX_INCLUDED)] | None = None
    encrypted_content: Any = None

    def add_to(self, messages: list[ChatMessage]) -> None:
        if self.content:
            turn = _assistant_turn(messages, "reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = _join(self.content)


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: ValidText
    name: ValidText
    namespace: ValidText | None = None
    arguments: ValidText

    def add_to(self, messages: list[ChatMessage]) -> None:
        name = name_for_model(self.namespace, self.name)
        function = CalledFunction(name=name, arguments=self.arguments)
        call = ToolCall(id=self.call_id, type="function", function=function)
        turn = _assistant_turn(messages)
        turn.setdefault("tool_calls", []).append(call.for_template())


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: ValidText
    output: Text

    def add_to(self, messages: list[ChatMessage]) -> None:
        messages.append(
            {"role": "tool", "tool_call_id": self.call_id, "content": _join(self.output)}
        )


class ItemReference(_Item):
    """Refused: this server stores nothing that it could refer to."""

    type: Literal["item_reference"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, _item: Any) -> Any:
        raise ValueError(
            "an item_reference has nothing to refer to, because this server stores nothing: send "
            "the item itself, as clients do with store: false"
        )

    def add_to(self, messages: list[ChatMessage]) -> None:  # noqa: ARG002 - never called
        raise AssertionError("it is never valid")


def _item_type(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    item_type = item.get("type")
    if item_type is None:
        return "message"
    return item_type if isinstance(item_type, str) else None


def _text_to_items(text: Any) -> Any:
    return [{"role": "user", "content": text}] if isinstance(text, str) else text


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_type),
]
Input = Annotated[
    list[Item],
    Field(min_length=1),
    FITS_CONTEXT,
    BeforeValidator(
        _text_to_items,
        json_schema_input_type=str | Annotated[list[Item], Field(min_length=1)],
    ),
]


class TextOptions(RequestModel):
    format: Annotated[TextFormat, null_is(PlainFormat(), TextFormat)] = PlainFormat()
    verbosity: Annotated[Any, NeutralOnly("medium")] = None


class ReasoningOptions(RequestModel):
    """How much to reason, where the chat template can be told. Reasoning is never summarized.

    Which reasoning of earlier turns the model sees is the template's choice.
    """

    effort: ValidText | None = None
    summary: ValidText | None = None
    generate_summary: ValidText | None = None
    mode: Annotated[Any, NeutralOnly("standard")] = None
    context: Any = None


class ResponsesStreamOptions(RequestModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(ConversationRequest):
    """POST /v1/responses. The items of the answer may be part of the input of the next request."""

    prompt_field: ClassVar[str] = "input"

    model: str
    input: Input
    instructions: ValidText | None = None
    max_output_tokens: TokenLimit | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    include: Annotated[list[_Included], AtMost(MAX_INCLUDED)] | None = None
    top_logprobs: NumTopLogprobs | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: StreamingOnly[ResponsesStreamOptions] | None = None
    access_programs: Refused = None
    background: FalseOnly = None
    background_options: Refused = None
    context_management: EmptyListOnly = None
    conversation: Refused = None
    image: Refused = None
    max_tool_calls: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None
    prompt_cache_options: EmptyObjectOnly = None
    truncation: Annotated[Any, NeutralOnly("disabled")] = None

    # Fields of other endpoints.
    best_of: OneOnly = None
    logprobs: Annotated[Any, NeutralOnly(False, instead="include")] = None
    max_completion_tokens: Annotated[Any, NeutralOnly(instead="max_output_tokens")] = None
    max_tokens: Annotated[Any, NeutralOnly(instead="max_output_tokens")] = None
    messages: Annotated[Any, NeutralOnly(instead="input")] = None
    n: OneOnly = None
    reasoning_effort: Refused = None
    response_format: Annotated[Any, NeutralOnly({"type": "text"}, instead="text.format")] = None

    def read_prompts(self) -> list[Prompt]:
        variables = self.template_variables
        return [Conversation(self.chat_messages(), {}, variables, self.tool_use.for_template())]

    def chat_messages(self) -> list[ChatMessage]:
        """Instructions and input as a chat."""
        messages: list[ChatMessage] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            item.add_to(messages)
        return messages

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def functions_of_tools(self) -> list[Function]:
        return [function for tool in self.tools or () for function in tool.functions]

    @property
    def namespaced_names(self) -> dict[str, dict[str, str]]:
        """The two names of each function in a namespace, by the name that the model is shown."""
        return {
            shown: names
            for tool in self.tools or ()
            for shown, names in tool.namespaced_names.items()
        }

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        has_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            message = "top_logprobs needs include to have message.output_text.logprobs"
            raise InvalidRequest(message, param="top_logprobs")
        return (self.top_logprobs or 0) if has_logprobs else None

    def field_of(self, param: str | None) -> str | None:
        return "include" if param == "logprobs" else super().field_of(param)

    def grammar_of_field(self) -> dict[str, Grammar]:
        with refusals_name("text.format"):
            format_grammar = self.text.format.grammar() if self.text else None
        if format_grammar is None:
            return super().grammar_of_field()
        return {"text.format": format_grammar, **super().grammar_of_field()}


class InputTokensRequest(ResponsesRequest):
    """POST /v1/responses/input_tokens: of how many tokens the prompt of a response would be."""

    personality: Refused = None
    truncation: Any = None
