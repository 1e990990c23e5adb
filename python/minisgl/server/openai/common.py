"""What the answers of several endpoints have in common: ids, usage, log probabilities, errors.

Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict

from minisgl.errors import EngineFailed, RequestError
from minisgl.message import TextLogprobs, UserReply

MAX_ERROR_TEXT = 512  # characters
TokenBytes: TypeAlias = bytes  # a model below has a field of that name
# As clients get it: the `FinishReason` of the engine, or that an answer calls tools.
ChoiceFinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ResponseModel(BaseModel):
    """Part of an answer.

    The OpenAPI document says that every field is there, also one with a default.
    """

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


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


def shorten(text: str) -> str:
    """The beginning and the end of a text: an error repeats only an excerpt of a request."""
    if len(text) <= MAX_ERROR_TEXT:
        return text
    return f"{text[: MAX_ERROR_TEXT // 2]} … {text[-MAX_ERROR_TEXT // 2 :]}"


# Without a docstring, which would be part of the OpenAPI document.
class ErrorBody(ResponseModel):
    message: Annotated[str, AfterValidator(shorten)]
    type: str
    param: Annotated[str, AfterValidator(shorten)] | None = None
    code: str | None = None


class ErrorResponse(ResponseModel):
    error: ErrorBody


def error_response(error: RequestError | EngineFailed) -> ErrorResponse:
    """OpenAI's error object for one of our errors."""
    if isinstance(error, EngineFailed):
        body = ErrorBody(message=str(error), type="server_error", code="engine_failed")
    else:
        body = ErrorBody(
            message=str(error), type=_error_type(error.status), param=error.param, code=error.code
        )
    return ErrorResponse(error=body)


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def reply_logprobs(reply: UserReply) -> list[TextLogprobs]:
    """The log probabilities of a reply: those of the prompt, then those of new tokens."""
    return [*(reply.prompt_logprobs or ()), *reply.logprobs]


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch, as OpenAI's `created`."""
    return int(time.time())
