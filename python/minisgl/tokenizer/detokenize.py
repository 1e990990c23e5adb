"""Token ids to text, as they come.

The texts of a request, joined, are equal to the decoded text of all its ids. There are two
difficulties. A character may be spread over several tokens, and a token's text may depend on the
token before it. The last few tokens are therefore decoded together with the tokens before them.
Text that a later token could change is held back: replacement characters at the end, and runs of
single-byte tokens, which are decoded as a whole.

        ids  ........│ context │ new tokens │
                     └──────── window ──────┘

A stop text may be spread over several tokens as well: `StopTexts` holds back a possible beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.message import DetokenizeMsg, TextLogprobs, UserReply

Decode: TypeAlias = Callable[[Sequence[int]], str]
_WINDOW = 16
_NUM_CACHED_TEXTS = 1 << 16  # texts of single tokens: many tokens of a scored prompt are equal
_REPLACEMENT = "\ufffd"


class StopTexts:
    """Searches a stream of text for stop texts; the one that is complete first ends the stream.

    Args:
        include: whether the stop text belongs to the answer.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Return what of the text so far is certain to come before a stop text, and is new."""
        if not self._stops:
            return text
        if self.has_stopped:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda place: (place[0] + len(place[1]), place[0]))
            self.has_stopped = True
            return text[: at + len(stop) * self._include]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return what is held back, after the end of the text; nothing after a stop text."""
        return "" if self.has_stopped else self._held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that begin the stop."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class IncrementalDecoder:
    """Decodes one answer token by token. Returns text once later tokens cannot change it.

    Args:
        byte_ids: tokens that stand for a single byte and are decoded as runs.
    """

    def __init__(self, decode: Decode, byte_ids: frozenset[int]) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._ids: list[int] = []
        self._context_start = 0
        self._new_start = 0
        self._num_shown = 0  # characters of the window that were returned, the context's included

    def feed(self, token: int) -> str:
        """Append a token; return the text that has become certain."""
        self._ids.append(token)
        window = self._ids[self._context_start :]
        text = self._decode(window)
        certain = self._num_certain(text, window)
        shown = text[self._num_shown : certain]
        self._num_shown = max(self._num_shown, certain)
        if certain == len(text) and len(window) > _WINDOW:
            self._move_window()
        return shown

    def flush(self) -> str:
        """Return what is held back, after the last token."""
        return self._decode(self._ids[self._context_start :])[self._num_shown :]

    def _num_certain(self, text: str, window: list[int]) -> int:
        """Characters that later tokens cannot change."""
        if self._byte_ids and self._ends_in_a_run(window):
            return self._num_shown
        return len(text.rstrip(_REPLACEMENT))

    def _ends_in_a_run(self, window: list[int]) -> bool:
        """Whether the last token with text is a byte; special tokens and unknown ids have none."""
        for token in reversed(window):
            if token in self._byte_ids:
                return True
            if self._decode([token]):
                return False
        return False

    def _move_window(self) -> None:
        """Make the new tokens the next context, if they have text of their own."""
        if self._decode(self._ids[self._new_start :]):
            self._context_start = self._new_start
            self._new_start = len(self._ids)
            self._num_shown = len(self._decode(self._ids[self._context_start :]))


class _Answer:
    """One unfinished answer. After a stop text no tokens are appended."""

    __slots__ = ("decoder", "num_tokens", "stops")

    def __init__(self, decoder: IncrementalDecoder, stops: StopTexts) -> None:
        self.decoder = decoder
        self.stops = stops
        self.num_tokens = 0

    def append(self, tokens: Sequence[int]) -> str:
        """Append tokens, up to the one that completes a stop text."""
        text = ""
        for token in tokens:
            text += self.stops.feed(self.decoder.feed(token))
            self.num_tokens += 1
            if self.stops.has_stopped:
                break
        return text

    def append_last(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Append the last tokens; return all that is held back too."""
        if finish == "stop" and tokens:
            text = self.append(tokens[:-1])
            # The end-of-sequence or stop token is counted, but it is not part of the text.
            self.num_tokens += not self.stops.has_stopped
        else:
            text = self.append(tokens)
        if self.stops.has_stopped:
            return text
        text += self.stops.feed(self.decoder.flush())
        return text + self.stops.flush()


class Detokenizer:
    """Keeps the unfinished answers, by uid, until the scheduler's last message of each.

    Args:
        decode: ids to text, special tokens skipped.
        decode_all: ids to text, special tokens written out.
        byte_ids: tokens that stand for a single byte and are decoded as runs.
    """

    def __init__(
        self,
        decode: Decode,
        decode_all: Decode | None = None,
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._decode_all = every = decode_all or decode
        self._text_of = lru_cache(_NUM_CACHED_TEXTS)(lambda token: every([token]))
        self._byte_ids = byte_ids
        self._answers: dict[int, _Answer] = {}

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def step(self, msg: DetokenizeMsg) -> UserReply | None:
        """Turn a request's output of one step into text. The end flushes what was held back.

        A stop text ends the answer here, before the scheduler knows: the caller has to abort the
        request then. What follows a stop text in its message is dropped.

        Returns:
            None after a stop text in an earlier message.
        """
        answer = self._answers.get(msg.uid)
        if answer is None:
            answer = self._answers[msg.uid] = self._begin(msg.params)
        is_last = msg.finish is not None or msg.error is not None
        if is_last:
            del self._answers[msg.uid]
        if answer.stops.has_stopped:
            return None

        num_before = answer.num_tokens
        text = answer.append_last(msg.tokens, msg.finish) if is_last else answer.append(msg.tokens)

        has_stopped = answer.stops.has_stopped
        return UserReply(
            msg.uid,
            text,
            finish="stop" if has_stopped else msg.finish,
            error=None if has_stopped else msg.error,
            logprobs=self._logprobs(msg, answer.num_tokens - num_before),
            num_prompt=msg.num_prompt,
            num_cached=msg.num_cached,
            num_output=answer.num_tokens,
            prompt_logprobs=[
                self._text_logprobs(token, entry) for token, entry in msg.prompt_logprobs or ()
            ],
            embedding=msg.embedding,
        )

    def _begin(self, params: SamplingParams | None) -> _Answer:
        if params is None:
            decoder = IncrementalDecoder(self._decode, self._byte_ids)
            return _Answer(decoder, StopTexts((), include=False))
        decode = self._decode if params.skip_special_tokens else self._decode_all
        stops = StopTexts(params.stop, include=params.include_stop_str_in_output)
        return _Answer(IncrementalDecoder(decode, self._byte_ids), stops)

    def _logprobs(self, msg: DetokenizeMsg, num_tokens: int) -> list[TextLogprobs]:
        """Entries of the first `num_tokens` tokens of a message, if it has any."""
        if not msg.logprobs:
            return []
        return [
            self._text_logprobs(token, entry)
            for token, entry in zip(msg.tokens[:num_tokens], msg.logprobs, strict=False)
        ]

    def _text_logprobs(self, token: int, entry: TokenLogprobs | None) -> TextLogprobs:
        text = self._text_of(token)
        if entry is None:
            return TextLogprobs(text, None, [])
        top = [(self._text_of(other), logprob) for other, logprob in entry.top]
        return TextLogprobs(text, entry.logprob, top)
