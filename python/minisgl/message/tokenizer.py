"""Messages to tokenizer and detokenizer processes."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import msgspec

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.message.base import BaseMsg
from minisgl.message.frontend import EngineStats, ReplyError
from minisgl.message.scheduler import AbortMsg, FlushCacheMsg, NewDetokenizerMsg

ChatMessage: TypeAlias = dict[str, Any]


class TokenIds(BaseMsg, frozen=True):
    """A prompt that is tokenized already; `raw` is packed by `pack_ids`."""

    raw: bytes


class Conversation(BaseMsg, frozen=True):
    """Messages for the chat template.

    Attributes:
        options: how the template is applied, such as `add_generation_prompt`.
        variables: of the template itself.
        tools: in the template's format.
    """

    messages: list[ChatMessage]
    options: dict[str, bool] = msgspec.field(default_factory=dict)
    variables: dict[str, Any] = msgspec.field(default_factory=dict)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)


Prompt: TypeAlias = str | Conversation | TokenIds
_decode_prompt = msgspec.msgpack.Decoder(Prompt).decode


def encode_prompt(prompt: Prompt) -> bytes:
    """A prompt as it is part of a message."""
    return msgspec.msgpack.encode(prompt)


def encoded_prompt(raw: bytes) -> Prompt:
    """A prompt from `encode_prompt`, which messages carry as it is. `open_prompt` looks inside."""
    return cast("Prompt", msgspec.Raw(raw))


def num_encoded_bytes(prompt: Prompt) -> int:
    """How large a prompt from `encoded_prompt` is; 0 for one that is not encoded yet."""
    return memoryview(prompt).nbytes if isinstance(prompt, msgspec.Raw) else 0


def open_prompt(prompt: Prompt) -> Prompt:
    """A prompt whose kind can be seen."""
    if isinstance(prompt, msgspec.Raw):
        opened: Prompt = _decode_prompt(prompt)
        return opened
    return prompt


class TokenizeMsg(BaseMsg, frozen=True):
    """API process → tokenizer: a new request.

    first_uid: of the API request that it is part of; prompts of one API request take turns as one.
    """

    uid: int
    prompt: Prompt
    sampling: SamplingParams
    first_uid: int | None = None


class EncodeMsg(BaseMsg, frozen=True):
    """API process → any tokenizer: tokenize this. The answer is a CodecReply.

    add_special_tokens: None adds them to a text but not to a conversation, whose template has them.
    """

    uid: int
    prompt: Prompt
    add_special_tokens: bool | None = None


class DecodeMsg(BaseMsg, frozen=True):
    """API process → any tokenizer: detokenize this. The answer is a CodecReply.

    ids: packed by `pack_ids`.
    """

    uid: int
    ids: bytes


class ShutdownMsg(BaseMsg, frozen=True):
    """API process → tokenizer, scheduler → detokenizer: no more messages will come.

    A detokenizer that also tokenizes gets the API process's alone.

    stops_scheduler: the tokenizer sends an ExitMsg to the scheduler; set for one tokenizer.
    """

    stops_scheduler: bool = False


class DetokenizeMsg(BaseMsg, frozen=True, gc=False):
    """Scheduler → detokenizer: the output of one step for one request.

    The message with `finish` or `error` is the request's last.

    Attributes:
        tokens: the new tokens; none after an abort or an error.
        logprobs: one entry per new token, or none if they were not asked for.
        params: the request's parameters, if they say anything about text; in its first message.
        prompt_tail: the last tokens of the prompt, after which the text goes on; in the first
            message.
        prompt_logprobs: tokens of the prompt with their log probabilities, if they were asked for;
            the first token has none. In the first message.
        embedding: of the prompt, if it was asked for; float32, little-endian. In the first message.
        prefill_s: seconds since its admission, by the scheduler's clock; in the first message.
        is_first: whether the request had no tokens before. The beginning of one that had may be
            lost with an earlier detokenizer.
    """

    uid: int
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    params: SamplingParams | None = None
    finish: FinishReason | None = None
    error: ReplyError | None = None
    num_prompt: int = 0
    num_cached: int = 0
    prompt_logprobs: list[tuple[int, TokenLogprobs | None]] | None = None
    embedding: bytes | None = None
    prompt_tail: list[int] = msgspec.field(default_factory=list)
    prefill_s: float | None = None
    is_first: bool = True

    @property
    def is_final(self) -> bool:
        return self.finish is not None or self.error is not None


class BatchDetokenizeMsg(BaseMsg, frozen=True):
    """Scheduler → detokenizer: the outputs of one step."""

    msgs: list[DetokenizeMsg]
    stats: EngineStats | None = None


TokenizerMsg: TypeAlias = (
    TokenizeMsg
    | EncodeMsg
    | DecodeMsg
    | AbortMsg
    | FlushCacheMsg
    | NewDetokenizerMsg
    | ShutdownMsg
    | BatchDetokenizeMsg
)
