"""Token ids of one answer to text, as they come. The time per token is bounded.

A character may be spread over several tokens, and what a token's text is may depend on the tokens
before it. Where a vocabulary knows the bytes of its tokens, `ByteDecoder` keeps the bytes of one
unfinished character and nothing else. For other tokenizers `WindowDecoder` decodes the last few
tokens together.

An answer goes on where its prompt ends, so a space between the two is kept. Only after a special
token that is not shown does a text begin, whose first space some tokenizers leave out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from minisgl.tokenizer.vocabulary import Spelling, Vocabulary

_REPLACEMENT = "\ufffd"
_MAX_HELD = 4  # tokens: a character has as many bytes at most
_CONTEXT = 4  # tokens
_BROKEN_BYTE = re.compile("[\udc80-\udcff]")  # as "surrogateescape" spells it
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextDecoder(Protocol):
    """Decodes one answer. The texts that it returns, joined, are the text of all tokens."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Append tokens; return the text that no later token can change."""

    def flush(self) -> str:
        """Return what is held back, after the last token."""

    def num_broken_by(self, token: int) -> int:
        """Characters that what is held back becomes if a token does not go on with it, else 0.

        Also 0 where that is not known.
        """


def begin_text(
    vocabulary: Vocabulary, context: Sequence[int], *, skip_special_tokens: bool
) -> TextDecoder:
    """A decoder for what comes after some tokens.

    Args:
        context: the last tokens of the prompt.
    """
    bytes_of = vocabulary.visible_bytes_of if skip_special_tokens else vocabulary.bytes_of
    if vocabulary.spelling is not None:
        return ByteDecoder(vocabulary.spelling, bytes_of, context)

    def decode(tokens: Sequence[int]) -> str:
        return vocabulary.decode(tokens, skip_special_tokens=skip_special_tokens)

    is_visible = vocabulary.is_visible if skip_special_tokens else vocabulary.is_known
    return WindowDecoder(decode, is_visible, context)


class ByteDecoder:
    """Joins the bytes of tokens. Holds back the bytes of one unfinished character, three at most.

    In a broken character of a sentencepiece vocabulary each byte becomes a U+FFFD, and characters
    beside it stay, as in sentencepiece itself. Rust's tokenizers replace the whole run of bytes.
    """

    def __init__(
        self, spelling: Spelling, bytes_of: Callable[[int], bytes], context: Sequence[int]
    ) -> None:
        self._bytes_of = bytes_of
        self._errors = spelling.errors
        self._utf8 = _Utf8Decoder(spelling.errors)
        self._holds_bytes = False
        goes_on = bool(context) and bool(bytes_of(context[-1]))
        self._strips_space = spelling.strips_space and not goes_on

    def feed(self, tokens: Sequence[int]) -> str:
        data = b"".join(map(self._bytes_of, tokens))
        if self._holds_bytes:
            return self._feed_part(data)
        try:  # most tokens are whole characters, for which this is many times faster
            text = data.decode()
        except UnicodeDecodeError:
            return self._feed_part(data)
        return self._strip_space(text) if self._strips_space else text

    def flush(self) -> str:
        return self._strip_space(self._clean(self._utf8.decode(b"", final=True)))

    def num_broken_by(self, token: int) -> int:
        if not self._holds_bytes:
            return 0
        held, _ = self._utf8.getstate()
        if not _breaks(self._bytes_of(token), held):
            return 0
        return len((held + b" ").decode(errors=self._errors)) - 1

    def _feed_part(self, data: bytes) -> str:
        """Append bytes that begin or end within a character, or are none."""
        text = self._clean(self._utf8.decode(data))
        held, _ = self._utf8.getstate()
        self._holds_bytes = bool(held)
        return self._strip_space(text)

    def _clean(self, text: str) -> str:
        return text if text.isascii() else _BROKEN_BYTE.sub(_REPLACEMENT, text)

    def _strip_space(self, text: str) -> str:
        """Leave out a space at the beginning of the text, once there is a text."""
        if self._strips_space and text:
            self._strips_space = False
            text = text.removeprefix(" ")
        return text


class WindowDecoder:
    """Decodes new tokens after a few that were shown. Holds back a few that end in U+FFFD.

    Args:
        decode: tokens to text, as a whole.
        is_visible: whether a token is part of a text; others are left out of the window.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_visible: Callable[[int], bool],
        context: Sequence[int],
    ) -> None:
        self._decode = decode
        self._is_visible = is_visible
        self._context: list[int] = []
        self._held: list[int] = []
        if context and is_visible(context[-1]):
            self._context = list(filter(is_visible, context))[-_CONTEXT:]

    def feed(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._feed_one, filter(self._is_visible, tokens)))

    def flush(self) -> str:
        return self._held_text()

    def num_broken_by(self, token: int) -> int:  # noqa: ARG002 - it decodes nothing by itself
        return 0

    def _feed_one(self, token: int) -> str:
        self._held.append(token)
        text = self._held_text()
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        self._context = [*self._context, *self._held][-_CONTEXT:]
        self._held = []
        return text

    def _held_text(self) -> str:
        if not self._held:
            return ""
        shown = self._decode(self._context)
        return self._decode(self._context + self._held)[len(shown) :]


class TokenStarts:
    """Where the text of each token begins, in characters, as tokens come.

    Parts of a character begin where it does. What breaks a character off begins behind its U+FFFD.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._num_characters = 0

    def append(self, token: int) -> int:
        """Append a token; return where its text begins."""
        start = self._num_characters + self._decoder.num_broken_by(token)
        self._num_characters += len(self._decoder.feed((token,)))
        return start


def _breaks(token: bytes, begun: bytes) -> bool:
    """Whether a token does not go on with the character that bytes before it have begun."""
    begin = begun + token[:1]
    try:
        begin.decode()
    except UnicodeDecodeError as error:
        return error.end < len(begin)  # else it lacks bytes
    return False
