"""POST /v1/chat/completions: the request, the objects of an answer, and their builder.

Reference: https://platform.openai.com/docs/api-reference/chat. Next to read: `parsing/dialect.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field

from minisgl.errors import InvalidRequest
from minisgl.message import Conversation, Prompt, TextLogprobs
from minisgl.server.answers.builder import ChoicesBuilder, ParsedReply
from minisgl.server.answers.objects import (
    OMITTED_IF_NULL,
    ChatLogprob,
    ChoiceFinishReason,
    ResponseModel,
    Usage,
)
from minisgl.server.openai.messages import Message, TextPart
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.deltas import (
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedOutput,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.server.requests.generation_request import (
    ChoicesRequest,
    ConversationRequest,
    check_max_tokens,
)
from minisgl.server.requests.tools import MAX_TOOLS, Function, NamedTool, Tool
from minisgl.server.requests.unsupported import EmptyObjectOnly
from minisgl.server.requests.validation import (
    FITS_CONTEXT,
    AtMost,
    NeutralOnly,
    NumTopLogprobs,
    RequestModel,
    TokenLimit,
    ValidText,
)


class Prediction(RequestModel):
    type: Literal["content"]
    content: ValidText | Annotated[list[TextPart], FITS_CONTEXT]


class ChatRequest(ConversationRequest, ChoicesRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    model: str
    messages: Annotated[list[Message], Field(min_length=1), FITS_CONTEXT]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), AtMost(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: ValidText | None = None
    prompt_cache_options: EmptyObjectOnly = None

    # Fields of other endpoints and servers.
    prompt: Annotated[Any, NeutralOnly(instead="messages")] = None
    input: Annotated[Any, NeutralOnly(instead="messages")] = None
    instructions: Annotated[Any, NeutralOnly(instead="messages")] = None
    max_output_tokens: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    reasoning: Annotated[Any, NeutralOnly({}, instead="chat_template_kwargs")] = None

    def placeholder(self) -> Any:
        return [{"role": "user", "content": "-"}]

    def read_prompts(self) -> list[Prompt]:
        messages = [message.for_template() for message in self.messages]
        variables = self.template_variables
        tools = self.tool_use.for_template()
        return [Conversation(messages, self._template_options(), variables, tools)]

    def _template_options(self) -> dict[str, bool]:
        options = {}
        if self.continue_final_message:
            options["add_generation_prompt"] = False
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message is not None:
            options["continue_final_message"] = self.continue_final_message
        return options

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def functions_of_tools(self) -> list[Function]:
        return [tool.function for tool in self.tools or ()]

    @property
    def allows_reasoning(self) -> bool:
        return super().allows_reasoning and not self.continue_final_message

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return check_max_tokens(self.max_tokens)


class FunctionCall(ResponseModel):
    name: str
    arguments: str


class MessageToolCall(ResponseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    @classmethod
    def of(cls, call: ParsedCall) -> MessageToolCall:
        return cls(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


class AssistantMessage(ResponseModel):
    """Fields for reasoning and tool calls are absent where there are none."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content", "refusal"]})

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = OMITTED_IF_NULL
    tool_calls: list[MessageToolCall] | None = OMITTED_IF_NULL

    @classmethod
    def of(cls, output: ParsedOutput) -> AssistantMessage:
        calls = [MessageToolCall.of(call) for call in output.calls]
        return cls(
            content=output.content if output.has_content else empty_content(output),
            reasoning_content=output.reasoning or None,
            tool_calls=calls or None,
        )


def empty_content(output: ParsedOutput) -> str | None:
    """The content of an answer that has none, as OpenAI's: null beside calls."""
    return None if output.calls else ""


class ChatLogprobs(ResponseModel):
    content: list[ChatLogprob]
    refusal: None = None

    @classmethod
    def of(cls, tokens: list[TextLogprobs]) -> ChatLogprobs:
        return cls(content=[ChatLogprob.of_token(token) for token in tokens])


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceFinishReason


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatBuilder(ChoicesBuilder):
    """Builds a `ChatCompletion`, or chunks whose choices are made by `chunk_choice`."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, request: ChatRequest, dialect: Dialect) -> None:
        parser_maker = dialect.parser_maker(request, eager=bool(request.stream))
        super().__init__(model, request, parser_maker)
        self._tools = request.tool_use

    def first_choices(self, index: int) -> list[dict[str, Any]]:
        return [chunk_choice(index, {"role": "assistant", "content": self._no_content})]

    @property
    def _no_content(self) -> str | None:
        """The content of a chunk without text: null as long as calls may come instead."""
        return None if self._tools.offered_tools else ""

    def reply_choices(self, parsed: ParsedReply) -> list[dict[str, Any]]:
        deltas = [chunk_delta(delta) for delta in parsed.deltas]
        logprobs = None
        if parsed.reply.logprobs:
            logprobs = ChatLogprobs.of(parsed.reply.logprobs).model_dump()
            deltas = deltas or [{"content": self._no_content}]

        choices = [chunk_choice(parsed.index, delta) for delta in deltas]
        if logprobs:
            choices[0]["logprobs"] = logprobs
        if parsed.reply.finish:
            delta = self._last_delta(self._outputs[parsed.index])
            choices.append(chunk_choice(parsed.index, delta, self.finish_reason(parsed.index)))
        return choices

    def _last_delta(self, output: ParsedOutput) -> dict[str, Any]:
        """What the chunks before the last one have not said: an empty content that is not null."""
        if output.has_content or self._no_content == empty_content(output):
            return {}
        return {"content": empty_content(output)}

    def finish_reason(self, index: int) -> ChoiceFinishReason:
        """As OpenAI: not "tool_calls" for one named tool, nor for a call that was cut off."""
        if self.asks_for_tools(index) and self._tools.named_tool is None:
            return "tool_calls"
        return super().finish_reason(index)

    def build(self) -> ChatCompletion | dict[str, Any]:
        completion = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index) for index in range(len(self._outputs))],
            usage=self.usage(),
        )
        return self._with_logprobs(completion) if self._has_logprobs else completion

    def _with_logprobs(self, completion: ChatCompletion) -> dict[str, Any]:
        """The completion with its log probabilities, a token encoded at a time.

        All of their objects at once would take ten times as much memory as the answer.
        """
        body = completion.model_dump()
        for choice, tokens in zip(body["choices"], self._logprobs, strict=True):
            encoded = [ChatLogprob.of_token(token).model_dump_json().encode() for token in tokens]
            choice["logprobs"] = {"content": [*map(msgspec.Raw, encoded)], "refusal": None}
        return body

    def _choice(self, index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage.of(self._outputs[index]),
            finish_reason=self.finish_reason(index),
        )


def chunk_choice(
    index: int, delta: dict[str, Any], finish_reason: ChoiceFinishReason | None = None
) -> dict[str, Any]:
    """The choice of a chunk, without log probabilities."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def chunk_delta(delta: Delta) -> dict[str, Any]:
    """The `delta` of a chunk's choice."""
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
