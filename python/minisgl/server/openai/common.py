"""OpenAI's objects of which answers are made: whole completions, models, errors.

Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "abort"]

_IfAny: Any = Field(default=None, exclude_if=lambda value: value is None)


class Answered(BaseModel):
    """Part of an answer: the document says that a field is always there, whether or not it has a default."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class PromptTokensDetails(Answered):
    cached_tokens: int = 0


class Usage(Answered):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class FunctionCall(Answered):
    name: str
    arguments: str


class ToolCall(Answered):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Answered):
    """Without reasoning or calls, it has no fields for them."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content", "refusal"]})

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = _IfAny
    tool_calls: list[ToolCall] | None = _IfAny


class Likely(Answered):
    """A token and its log probability; `bytes` is null where it is not a whole character."""

    token: str
    logprob: float
    bytes: list[int] | None

    @classmethod
    def of(cls, text: str, logprob: float | None) -> Self:
        assert logprob is not None  # only a prompt's first token has none
        return cls(
            token=text, logprob=logprob, bytes=None if "\ufffd" in text else list(text.encode())
        )


class ChatLogprob(Likely):
    top_logprobs: list[Likely] = []


class ChatLogprobs(Answered):
    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(Answered):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(Answered):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Answered):
    """Parallel lists, an entry a token; `text_offset` counts characters of the tokens before.

    Nothing predicts the first token of a prompt: there is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answered):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason


class Completion(Answered):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(Answered):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minisgl"
    max_model_len: int


class ModelList(Answered):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(Answered):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Answered):
    error: ErrorBody


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch, as OpenAI's `created`."""
    return int(time.time())
