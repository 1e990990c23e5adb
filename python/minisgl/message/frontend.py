"""What the API server receives."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.message.base import BaseMsg


class BaseFrontendMsg(BaseMsg, frozen=True):
    """Sent to the API server."""


class ReplyError(BaseMsg, frozen=True):
    """An error that crosses a process border; the fields of an OpenAI error object and its HTTP status."""

    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: RequestError) -> ReplyError:
        return cls(error.status, error.code, str(error), error.param)


class TextLogprobs(BaseMsg, frozen=True):
    """The text of a token and its log probability; those of the likeliest, the likeliest first.

    logprob: None for the first token of a prompt, which nothing predicts.
    """

    text: str
    logprob: float | None
    top: list[tuple[str, float]]


class UserReply(BaseFrontendMsg, frozen=True):
    """(De)tokenizer → API server: more text of a request, or its end.

    Attributes:
        text: what is new; may be empty while part of a character is held back.
        finish, error: either marks the last reply of the uid.
        logprobs: one entry a new token, if they were asked for; the text of a token may still be held back.
        prompt_logprobs: of all tokens of the prompt, if they were asked for; in the first reply.
        embedding: of the prompt, if it was asked for; float32, little-endian. In the first reply too.
        num_prompt, num_cached, num_output: tokens so far, for usage.
    """

    uid: int
    text: str = ""
    finish: FinishReason | None = None
    error: ReplyError | None = None
    logprobs: list[TextLogprobs] = msgspec.field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    prompt_logprobs: list[TextLogprobs] | None = None
    embedding: bytes | None = None

    @property
    def is_final(self) -> bool:
        return self.finish is not None or self.error is not None


class CodecReply(BaseFrontendMsg, frozen=True):
    """Tokenizer → API server: `ids`, packed, for an EncodeMsg, `text` for a DecodeMsg, or why there is none."""

    uid: int
    ids: bytes = b""
    text: str = ""
    error: ReplyError | None = None


class EngineStats(BaseMsg, frozen=True):
    """How scheduler 0 stands after a step. Sent along with its news when it has changed.

    Attributes:
        num_pages_used: pages that requests hold; those that could be evicted are not among them.
        num_retractions: since the start.
    """

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    num_retractions: int


class BatchFrontendMsg(BaseFrontendMsg, frozen=True):
    """Detokenizer → API server: all news of one step."""

    replies: list[UserReply]
    stats: EngineStats | None = None


FrontendMsg: TypeAlias = UserReply | CodecReply | BatchFrontendMsg
