"""Token ids to text, one at a time.

The pieces of a request, put together, are exactly the decode of all its ids. Two things stand in the way: a character
may be spread over several tokens, and a decode may depend on the token before. So the last few tokens are decoded
together, with their predecessors, and what is not yet certain is held back: replacement characters at the end, and
runs of single-byte tokens, which only make sense as a whole.

        ids  ........│ context │ new tokens
                     prefix    read            text of the window = context + new

A text that ends the answer may be spread over several pieces as well: `StopTexts` holds back what may be its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.message import DetokenizeMsg, TextLogprobs, UserReply

Decode: TypeAlias = Callable[[Sequence[int]], str]
_WINDOW = 16
_NUM_REMEMBERED = 1 << 16  # texts of single tokens: a scored prompt has many times the same
_REPLACEMENT = "\ufffd"


class StopTexts:
    """Looks in a stream for the one of several texts that is complete first.

    Args:
        include: whether the found text is handed out.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str, *, flush: bool) -> str:
        """What may be handed out of the text so far; with `flush`, no more will come. Nothing after the stop."""
        if self.has_stopped:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda place: (place[0] + len(place[1]), place[0]))
            self.has_stopped = True
            return text[: at + len(stop) * self._include]
        certain = (
            len(text)
            if flush
            else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        )
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that begin the stop."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class _Answer:
    """The text of one request so far."""

    __slots__ = ("decode", "ids", "num_shown", "prefix", "read", "stops")

    def __init__(self, decode: Decode, stops: StopTexts) -> None:
        self.decode = decode
        self.stops = stops
        self.ids: list[int] = []
        self.prefix = 0
        self.read = 0
        self.num_shown = 0  # characters of the window that were handed out, the context's included


class Detokenizer:
    """Keeps the unfinished answers, by uid; each is forgotten with its last message.

    Args:
        decode: ids to text, special tokens skipped.
        decode_all: the same, special tokens written out.
        byte_ids: tokens that stand for a single byte and are decoded as runs.
    """

    def __init__(
        self,
        decode: Decode,
        decode_all: Decode | None = None,
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._decode_all = everything = decode_all or decode
        self._text_of = lru_cache(_NUM_REMEMBERED)(lambda token: everything([token]))
        self._byte_ids = byte_ids
        self._answers: dict[int, _Answer] = {}

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def step(self, msg: DetokenizeMsg) -> UserReply | None:
        """The news of a request as text. The end of an answer brings out what was held back.

        A text that ends the answer does so here, before the scheduler knows: who calls has to abort the request then.
        None: the answer had ended so.
        """
        answer = self._answers.get(msg.uid) or self._answers.setdefault(
            msg.uid, self._begin(msg.params)
        )
        ends = msg.finish is not None or msg.error is not None
        if ends:
            del self._answers[msg.uid]
        if answer.stops.has_stopped:
            return None
        num_output = len(answer.ids) + (msg.token is not None)
        if (
            msg.token is not None and msg.finish != "stop"
        ):  # the token that says stop is not part of the text
            answer.ids.append(msg.token)
        text = answer.stops.feed(self._advance(answer, flush=ends), flush=ends)
        return UserReply(
            msg.uid,
            text,
            finish="stop" if answer.stops.has_stopped else msg.finish,
            error=msg.error,
            logprobs=self._text_logprobs(msg.token, msg.logprobs)
            if msg.token is not None and msg.logprobs
            else None,
            num_prompt=msg.num_prompt,
            num_cached=msg.num_cached,
            num_output=num_output,
            prompt_logprobs=[
                self._text_logprobs(token, told) for token, told in msg.prompt_logprobs or ()
            ],
            embedding=msg.embedding,
        )

    def _begin(self, params: SamplingParams | None) -> _Answer:
        if params is None:
            return _Answer(self._decode, StopTexts((), include=False))
        stops = StopTexts(params.stop, include=params.include_stop_str_in_output)
        return _Answer(self._decode if params.skip_special_tokens else self._decode_all, stops)

    def _text_logprobs(self, token: int, told: TokenLogprobs | None) -> TextLogprobs:
        if told is None:
            return TextLogprobs(self._text_of(token), None, [])
        return TextLogprobs(
            self._text_of(token),
            told.logprob,
            [(self._text_of(other), logprob) for other, logprob in told.top],
        )

    def _advance(self, answer: _Answer, *, flush: bool) -> str:
        window = answer.ids[answer.prefix :]
        if not window:
            return ""
        text = answer.decode(window)
        certain = len(text) if flush else self._num_certain(answer, text, window)
        news = text[answer.num_shown : certain]
        answer.num_shown = max(answer.num_shown, certain)
        if certain == len(text) and len(window) > _WINDOW:
            self._move_window(answer)
        return news

    def _num_certain(self, answer: _Answer, text: str, window: list[int]) -> int:
        """Characters that later tokens cannot change."""
        if self._byte_ids and self._ends_in_a_run(answer, window):
            return answer.num_shown
        return len(text.rstrip(_REPLACEMENT))

    def _ends_in_a_run(self, answer: _Answer, window: list[int]) -> bool:
        """Whether the last token that has any text is a byte; special tokens and unknown ids have none."""
        visible = (
            token for token in reversed(window) if token in self._byte_ids or answer.decode([token])
        )
        return next(visible, None) in self._byte_ids

    def _move_window(self, answer: _Answer) -> None:
        """Begin the window at its new tokens, if they have text of their own to be the next context."""
        context = answer.decode(answer.ids[answer.read :])
        if context:
            answer.prefix, answer.read = answer.read, len(answer.ids)
            answer.num_shown = len(answer.decode(answer.ids[answer.prefix :]))
