"""Messages to API processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.message.base import BaseMsg
from minisgl.utils.excerpts import with_utf8


class ReplyError(BaseMsg, frozen=True):
    """An error of another process: an HTTP status and the fields of an OpenAI error object."""

    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: RequestError) -> ReplyError:
        return cls(error.status, error.code, with_utf8(str(error)), error.param)

    def rebuild(self) -> RequestError:
        """The error again, to be raised."""
        error = RequestError(self.message, param=self.param, code=self.code)
        error.status = self.status
        return error


class TextLogprobs(BaseMsg, frozen=True):
    """The bytes and log probability of a token, and those of the likeliest tokens at its position.

    Attributes:
        token: UTF-8; of a character that is spread over several tokens, only this one's part.
        logprob: None for the first token of a prompt, which nothing predicts.
        top: the likeliest tokens, the likeliest first.
        start: where its text begins, in characters of the answer's text. For a token of the prompt:
            in characters of the prompt's text, with special tokens written out.
    """

    token: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]
    start: int = 0

    @property
    def text(self) -> str:
        """The text of the token by itself; bytes that are no character become U+FFFD."""
        return self.token.decode(errors="replace")

    @property
    def top_texts(self) -> list[tuple[str, float]]:
        return [(token.decode(errors="replace"), logprob) for token, logprob in self.top]


class UserReply(BaseMsg, frozen=True):
    """(De)tokenizer → API process: new text of a request, or its end.

    Attributes:
        text: of all new tokens; empty while a character is incomplete.
        finish, error: either marks the last reply of the uid.
        stop_text: the one of the request's stop texts that ended it, if one did.
        logprobs: one entry per new token if they were asked for, else empty. The text of a token
            may still be held back.
        num_prompt, num_cached, num_output: tokens so far, for usage. `num_prompt` is 0 if no step
            has computed any of the prompt.
        prompt_logprobs: one entry per token of the prompt, if they were asked for; in the first
            reply.
        embedding: of the prompt, if it was asked for; float32, little-endian. In the first reply.
        prefill_s: seconds from its admission to its first output, by the scheduler's clock; in the
            first reply.
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
    stop_text: str | None = None
    prefill_s: float | None = None

    @property
    def is_final(self) -> bool:
        return self.finish is not None or self.error is not None


def join_replies(replies: Sequence[UserReply]) -> UserReply:
    """One reply that says what consecutive replies to a uid say. They have no `logprobs`."""
    if len(replies) == 1:
        return replies[0]
    return msgspec.structs.replace(
        replies[-1],
        text="".join(reply.text for reply in replies),
        prompt_logprobs=replies[0].prompt_logprobs,
        embedding=replies[0].embedding,
    )


class CodecReply(BaseMsg, frozen=True):
    """Tokenizer → API process: the answer to an EncodeMsg or a DecodeMsg.

    Attributes:
        ids: for an EncodeMsg; packed by `pack_ids`.
        text: for a DecodeMsg.
        error: why there is neither.
    """

    uid: int
    ids: bytes = b""
    text: str = ""
    error: ReplyError | None = None


class EngineStats(BaseMsg, frozen=True):
    """Counts of scheduler 0 after a step. They are sent with its outputs when they have changed.

    Attributes:
        num_pages_used: pages that requests hold; pages that can be evicted are not counted.
        num_retractions, num_steps: retracted requests and launched steps since the start.
        num_computed_tokens: tokens of prompts, and of retracted requests, that were computed.
        num_cached_tokens: tokens that were not, because the prefix cache supplied them.
        budget_tokens, budget_ms: prompt tokens that a step may compute beside running requests, and
            how long it may take for that; of the latest such step, 0 ms if nothing bounds it.
        flushes: the answers to FlushCacheMsgs that came since the last such message: their uids,
            each with the number of tokens that were dropped.
        epoch: of the scheduler: how often the workers were started again. Counts of an epoch may
            come after its end.
    """

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    num_retractions: int
    num_steps: int
    num_computed_tokens: int
    num_cached_tokens: int
    budget_tokens: int = 0
    budget_ms: float = 0.0
    flushes: list[tuple[int, int]] = msgspec.field(default_factory=list)
    epoch: int = 0


class BatchFrontendMsg(BaseMsg, frozen=True):
    """Detokenizer → API process: all replies of one step that are for this API process."""

    replies: list[UserReply]
    stats: EngineStats | None = None


FrontendMsg: TypeAlias = UserReply | CodecReply | BatchFrontendMsg
