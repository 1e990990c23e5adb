"""Objects in the answers of several endpoints: usage, log probabilities; and the ids of answers.

Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from minisgl.message import TextLogprobs, UserReply

TokenBytes: TypeAlias = bytes  # a model below has a field of that name
# As clients get it: the engine's `FinishReason`, or "tool_calls".
ChoiceFinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ResponseModel(BaseModel):
    """Part of an answer.

    The OpenAPI document says that every field is present, also one with a default.
    """

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


OMITTED_IF_NULL: Any = Field(default=None, exclude_if=lambda value: value is None)


class PromptTokensDetails(ResponseModel):
    cached_tokens: int = 0


class Usage(ResponseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class TopLogprob(ResponseModel):
    """A token and its log probability. Its bytes may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, token: TokenBytes, logprob: float | None) -> Self:
        assert logprob is not None  # only the first token of a prompt has none
        text = token.decode(errors="replace")
        return cls(token=text, logprob=logprob, bytes=list(token))


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []

    @classmethod
    def of_token(cls, token: TextLogprobs) -> Self:
        logprob = cls.of(token.token, token.logprob)
        logprob.top_logprobs = [TopLogprob.of(other, number) for other, number in token.top]
        return logprob


def reply_logprobs(reply: UserReply) -> list[TextLogprobs]:
    """The log probabilities of a reply: those of the prompt, then those of new tokens."""
    return [*(reply.prompt_logprobs or ()), *reply.logprobs]


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch, as OpenAI's `created`."""
    return int(time.time())
