"""Outputs of the scheduler to replies with text, as they come.

`text_decoders.py` turns the tokens of an answer into text. A stop text may be spread over several
tokens, so `StopTexts` holds back a possible beginning. The time per token is bounded, however long
the answer is. Next to read: `server/http/streaming.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minisgl.core import FinishReason, SamplingParams, TokenLogprobs
from minisgl.message import DetokenizeMsg, TextLogprobs, UserReply
from minisgl.tokenizer.text_decoders import TextDecoder, TokenStarts, begin_text
from minisgl.tokenizer.vocabulary import Vocabulary

_DEFAULT = SamplingParams()


class _StopText:
    """Where in a growing text one stop text may begin.

    Positions that are ruled out are not searched again.
    """

    __slots__ = ("_stop", "start")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.start = 0  # the first position where the text may be, or become, the stop text

    def advance(self, text: str, *, may_end: bool) -> int | None:
        """Search the longer text; return where the stop text ends, if it is there.

        Args:
            may_end: whether it may be there; else one that is complete is passed over.
        """
        stop = self._stop
        start = text.find(stop[0], self.start)
        while start >= 0:
            is_complete = start + len(stop) <= len(text)
            if stop.startswith(text[start : start + len(stop)]) and (may_end or not is_complete):
                break
            start = text.find(stop[0], start + 1)
        self.start = len(text) if start < 0 else start
        end = self.start + len(stop)
        return end if end <= len(text) else None


class StopTexts:
    """Searches a stream of text for stop texts; the one that is complete first ends the stream.

    Args:
        include: whether the stop text belongs to the answer.

    Attributes:
        is_searching: whether there are stop texts.
        found: the stop text that has ended the stream.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._searches = [_StopText(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None

        self.is_searching = bool(stops)

    @property
    def has_stopped(self) -> bool:
        return self.found is not None

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Return the new text that certainly comes before any stop text.

        Args:
            may_end: whether a stop text that is complete now ends the stream.
        """
        if not self.is_searching:
            return text
        if self.has_stopped:
            return ""
        text = self._held + text
        found = []
        for search in self._searches:
            end = search.advance(text, may_end=may_end)
            if end is not None:
                found.append((end, search.start))
        if found:
            end, start = min(found)
            self.found = text[start:end]
            return text[: end if self._include else start]
        certain = min(search.start for search in self._searches)
        for search in self._searches:
            search.start -= certain
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return what is held back, after the end of the text; nothing after a stop text."""
        return "" if self.has_stopped else self._held


class _Answer:
    """One unfinished answer. After a stop text no tokens are appended.

    Args:
        begin: begins the text of its tokens.
    """

    __slots__ = (
        "_begin",
        "_includes_stop",
        "_min_tokens",
        "_starts",
        "decoder",
        "num_tokens",
        "stops",
    )

    def __init__(self, begin: Callable[[], TextDecoder], params: SamplingParams) -> None:
        self._begin = begin
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._starts: TokenStarts | None = None
        self.decoder = begin()
        self.stops = StopTexts(params.stop, include=self._includes_stop)
        self.num_tokens = 0

    @property
    def starts(self) -> TokenStarts:
        """Where its tokens begin; only answers with log probabilities ask for it."""
        if self._starts is None:
            self._starts = TokenStarts(self._begin())
        return self._starts

    def append(self, tokens: Sequence[int]) -> str:
        """Append tokens, up to the one that completes a stop text."""
        if not self.stops.is_searching:
            self.num_tokens += len(tokens)
            return self.decoder.feed(tokens)
        text = ""
        for token in tokens:
            self.num_tokens += 1
            text += self.stops.feed(self.decoder.feed((token,)), may_end=self._may_end)
            if self.stops.has_stopped:
                break
        return text

    @property
    def _may_end(self) -> bool:
        """Whether a stop text that the latest token completes ends the answer."""
        return self.num_tokens > self._min_tokens

    def append_last(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Append the last tokens; return all that is held back too."""
        if finish == "stop" and tokens and not self._includes_stop:
            text = self.append(tokens[:-1])
            # The end-of-sequence or stop token is counted, but it is not part of the text.
            self.num_tokens += not self.stops.has_stopped
        else:
            text = self.append(tokens)
        if self.stops.has_stopped:
            return text
        text += self.stops.feed(self.decoder.flush(), may_end=self._may_end)
        return text + self.stops.flush()


class Detokenizer:
    """Turns outputs into replies. Keeps each answer, by uid, until the scheduler's last message."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._answers: dict[int, _Answer] = {}

    def get_ready(self) -> None:
        """Do what would be done when a token comes for the first time."""
        self._vocabulary.spell_all()

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def can_take(self, msg: DetokenizeMsg) -> bool:
        """Whether a message can become a reply: all but the first need the answer's beginning.

        If that is not here, an earlier detokenizer had it. The answer then cannot go on.
        """
        return msg.uid in self._answers or msg.is_first or msg.error is not None

    def make_reply(self, msg: DetokenizeMsg) -> UserReply | None:
        """Turn a request's output of one step into text. The end flushes what was held back.

        A stop text ends the answer here, before the scheduler knows: the caller has to abort the
        request then. What follows a stop text in its message is dropped.

        Returns:
            None after a stop text in an earlier message.
        """
        answer = self._answers.get(msg.uid)
        if answer is None:
            answer = self._begin(msg.prompt_tail, msg.params or _DEFAULT)
            self._answers[msg.uid] = answer
        if msg.is_final:
            del self._answers[msg.uid]
        if answer.stops.has_stopped:
            return None

        num_before = answer.num_tokens
        if msg.is_final:
            text = answer.append_last(msg.tokens, msg.finish)
        else:
            text = answer.append(msg.tokens)

        stop_text = answer.stops.found
        return UserReply(
            msg.uid,
            text,
            finish=msg.finish if stop_text is None else "stop",
            error=msg.error if stop_text is None else None,
            logprobs=self._logprobs(msg, answer, answer.num_tokens - num_before),
            num_prompt=msg.num_prompt,
            num_cached=msg.num_cached,
            num_output=answer.num_tokens,
            prompt_logprobs=self._prompt_logprobs(msg),
            embedding=msg.embedding,
            stop_text=stop_text,
            prefill_s=msg.prefill_s,
        )

    def _prompt_logprobs(self, msg: DetokenizeMsg) -> list[TextLogprobs] | None:
        if msg.prompt_logprobs is None:
            return None
        starts = TokenStarts(begin_text(self._vocabulary, (), skip_special_tokens=False))
        return [
            self._text_logprobs(token, entry, starts.append(token))
            for token, entry in msg.prompt_logprobs
        ]

    def read(
        self,
        prompt_tail: Sequence[int],
        tokens: Sequence[int],
        params: SamplingParams,
        finish: FinishReason,
    ) -> str:
        """Return the text of a whole answer, without keeping it.

        Args:
            prompt_tail: the last tokens of its prompt.
        """
        return self._begin(prompt_tail, params).append_last(tokens, finish)

    def _begin(self, prompt_tail: Sequence[int], params: SamplingParams) -> _Answer:
        begin = partial(
            begin_text,
            self._vocabulary,
            prompt_tail,
            skip_special_tokens=params.skip_special_tokens,
        )
        return _Answer(begin, params)

    def _logprobs(self, msg: DetokenizeMsg, answer: _Answer, num_tokens: int) -> list[TextLogprobs]:
        """Entries of the first `num_tokens` tokens of a message, if it has any."""
        if not msg.logprobs:
            return []
        starts = answer.starts
        return [
            self._text_logprobs(token, entry, starts.append(token))
            for token, entry in zip(msg.tokens[:num_tokens], msg.logprobs, strict=False)
        ]

    def _text_logprobs(self, token: int, entry: TokenLogprobs | None, start: int) -> TextLogprobs:
        bytes_of = self._vocabulary.bytes_of
        if entry is None:
            return TextLogprobs(bytes_of(token), None, [], start)
        top = [(bytes_of(other), logprob) for other, logprob in entry.top]
        return TextLogprobs(bytes_of(token), entry.logprob, top, start)
