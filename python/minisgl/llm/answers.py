"""From the outputs of steps to the answer to a prompt, as texts and tokens.

Next to read: `tokenizer/detokenize.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.message import DetokenizeMsg
from minisgl.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """Output of one step for one prompt: the new tokens, and the text that has become certain.

    Attributes:
        logprobs: of each new token, if they were asked for.
        prompt_logprobs: of each token of the prompt, with its first output, if they were asked for;
            None for the first token.
        embedding: of the prompt, with its first output, if it was asked for.
    """

    index: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: NDArray[np.float32] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, index: int, msg: DetokenizeMsg, text: str, params: SamplingParams) -> StreamOutput:
        return cls(
            index,
            msg.tokens,
            text,
            msg.finish,
            logprobs=None if params.logprobs is None else msg.logprobs,
            prompt_logprobs=_prompt_logprobs(msg),
            embedding=embedding_of(msg),
        )


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A finished answer. The token that ended it is among the ids, and in the text if asked for.

    Attributes:
        logprobs: of each token, if they were asked for.
        prompt_logprobs: of each token of the prompt, if they were asked for; None for the first.
        embedding: of the prompt, if it was asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt: int
    num_cached: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: NDArray[np.float32] | None = field(default=None, compare=False)


class TextReader:
    """Reads outputs as text, and cuts each after a stop text."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_tokens: Counter[int] = Counter()

    def read(self, msg: DetokenizeMsg) -> tuple[DetokenizeMsg, str]:
        """Return the output, without what follows a stop text, and its text.

        It must not be called after the end of an answer.
        """
        reply = self._detokenizer.make_reply(msg)
        assert reply is not None
        num_new = reply.num_output - self._num_tokens[msg.uid]
        self._num_tokens[msg.uid] = reply.num_output
        cut = structs.replace(
            msg,
            tokens=msg.tokens[:num_new],
            logprobs=msg.logprobs[:num_new],
            finish=reply.finish,
            error=reply.error,
        )
        return cut, reply.text


class PartialAnswer:
    """The outputs of one prompt so far."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._embedding: NDArray[np.float32] | None = None
        self._prompt_tail: list[int] = []
        self._last: DetokenizeMsg | None = None

    def append(self, msg: DetokenizeMsg, text: str) -> None:
        self._ids += msg.tokens
        if text:
            self._texts.append(text)
        if msg.logprobs:
            self._logprobs += msg.logprobs
        if msg.is_first:
            self._prompt_tail += msg.prompt_tail
            self._prompt_logprobs = _prompt_logprobs(msg)
            self._embedding = embedding_of(msg)
        self._last = msg

    def output(self, detokenizer: Detokenizer | None) -> GenerationOutput:
        """Return the finished answer.

        Args:
            detokenizer: reads the answer as a whole, where no text came with its steps.
        """
        last = self._last
        assert last is not None
        assert last.finish is not None
        text = "".join(self._texts)
        if detokenizer is not None:
            text = self._read_whole(detokenizer, last)
        return GenerationOutput(
            text,
            self._ids,
            last.finish,
            last.num_prompt,
            last.num_cached,
            logprobs=None if self._params.logprobs is None else self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )

    def _read_whole(self, detokenizer: Detokenizer, last: DetokenizeMsg) -> str:
        """The text of all outputs, read as if one step had given them."""
        # A stop token is the last one of the last output, or there is none.
        ended_by_token = last.finish == "stop" and bool(last.tokens)
        finish: FinishReason = "stop" if ended_by_token else "length"
        return detokenizer.read(self._prompt_tail, self._ids, self._params, finish)


def embedding_of(msg: DetokenizeMsg) -> NDArray[np.float32] | None:
    """The embedding that an output has, as the caller's own array."""
    return None if msg.embedding is None else np.frombuffer(msg.embedding, "<f4").copy()


def _prompt_logprobs(msg: DetokenizeMsg) -> list[TokenLogprobs | None] | None:
    if msg.prompt_logprobs is None:
        return None
    return [entry for _, entry in msg.prompt_logprobs]
