"""Token ids to text, one at a time.

The pieces of a request, put together, are exactly the decode of all its ids. Two things stand in the way: a character
may be spread over several tokens, and a decode may depend on the token before. So the last few tokens are decoded
together, with their predecessors, and what is not yet certain is held back: replacement characters at the end, and
runs of single-byte tokens, which only make sense as a whole.

        ids  ........│ context │ new tokens
                     prefix    read            text of the window = context + new
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.message import DetokenizeMsg, UserReply

_WINDOW = 16
_REPLACEMENT = "\ufffd"


class _Answer:
    """The text of one request so far."""

    __slots__ = ("ids", "num_shown", "prefix", "read")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.prefix = 0
        self.read = 0
        self.num_shown = 0  # characters of the window that were handed out, the context's included


class Detokenizer:
    """Keeps the unfinished answers, by uid; each is forgotten with its last message.

    Args:
        decode: ids to text, special tokens skipped.
        byte_ids: tokens that stand for a single byte and are decoded as runs.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._answers: dict[int, _Answer] = {}

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def step(self, msg: DetokenizeMsg) -> UserReply:
        """The news of a request as text. The end of an answer brings out what was held back."""
        answer = self._answers.setdefault(msg.uid, _Answer())
        ends = msg.finish is not None or msg.error is not None
        num_output = len(answer.ids) + (msg.token is not None)
        if msg.token is not None and msg.finish != "stop":  # the token that says stop is not part of the text
            answer.ids.append(msg.token)
        text = self._advance(answer, flush=ends)
        if ends:
            del self._answers[msg.uid]
        return UserReply(
            msg.uid,
            text,
            finish=msg.finish,
            error=msg.error,
            num_prompt=msg.num_prompt,
            num_cached=msg.num_cached,
            num_output=num_output,
        )

    def _advance(self, answer: _Answer, *, flush: bool) -> str:
        window = answer.ids[answer.prefix :]
        if not window:
            return ""
        text = self._decode(window)
        certain = len(text) if flush else self._num_certain(text, window, answer.num_shown)
        news = text[answer.num_shown : certain]
        answer.num_shown = max(answer.num_shown, certain)
        if certain == len(text) and len(window) > _WINDOW:
            self._move_window(answer)
        return news

    def _num_certain(self, text: str, window: list[int], num_shown: int) -> int:
        """Characters that later tokens cannot change."""
        if self._byte_ids and self._ends_in_a_run(window):
            return num_shown
        return len(text.rstrip(_REPLACEMENT))

    def _ends_in_a_run(self, window: list[int]) -> bool:
        """Whether the last token that has any text is a byte; special tokens and unknown ids have none."""
        visible = (token for token in reversed(window) if token in self._byte_ids or self._decode([token]))
        return next(visible, None) in self._byte_ids

    def _move_window(self, answer: _Answer) -> None:
        """Begin the window at its new tokens, if they have text of their own to be the next context."""
        context = self._decode(answer.ids[answer.read :])
        if context:
            answer.prefix, answer.read = answer.read, len(answer.ids)
            answer.num_shown = len(self._decode(answer.ids[answer.prefix :]))
