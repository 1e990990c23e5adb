"""Refuses texts that are too long, without tokenizing them as a whole.

That would take hundreds of bytes of memory per token, and delay the texts of others.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from minisgl.errors import PromptTooLong

_USUAL_CHARACTERS = 8  # of a token, at most; a longer text is looked at piece by piece
_PIECE = 2**14  # characters
_PIECE_SLACK = 256  # tokens
_WHITESPACE_SAMPLE = "  \t\r\n a1!é语\u3000  "  # some pre-tokenizers drop a part of it
_NORMALIZER_SHRINKS = {  # how many times shorter a normalizer can make the UTF-8 of a text
    "NoneType": 1,
    "NFC": 4,  # by 3.5 at most
}


class LengthCheck:
    """Refuses texts that certainly have more tokens than they may.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get_ready(self) -> None:
        """Read the vocabulary now."""
        _ = self.max_token_bytes

    def check(self, text: str, max_tokens: int | None) -> None:
        """Refuse a text that must have more tokens than `max_tokens`. None is no limit.

        Raises:
            PromptTooLong: it must.
        """
        if max_tokens is not None and len(text) > max_tokens and self.max_token_bytes:
            _check_min_tokens(len(text.encode()), max_tokens, self.max_token_bytes)
        if max_tokens is not None and len(text) > _USUAL_CHARACTERS * max_tokens + _PIECE:
            self._check_pieces(text, max_tokens)

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Raise PromptTooLong if the pieces of a text have twice as many tokens as it may have.

        A cut between pieces adds a few tokens, and never as many as the text may have.
        """
        num_tokens = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            num_tokens += len(self._tokenizer(piece, add_special_tokens=False)["input_ids"])
            if num_tokens > 2 * max_tokens + _PIECE_SLACK:
                raise PromptTooLong(
                    max_tokens,
                    f"you sent {len(text)} characters, the first {start + len(piece)} of which "
                    f"are about {num_tokens} tokens",
                )

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most UTF-8 bytes of a text that become one token; None if there may be no bound.

        It is known only for byte-level vocabularies that keep every byte of a text.
        """
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not _keeps_every_byte(backend):
            return None
        shrinks = _NORMALIZER_SHRINKS.get(type(backend.normalizer).__name__)
        if shrinks is None:
            return None
        added = self._tokenizer.added_tokens_decoder.values()
        if any(token.lstrip or token.rstrip for token in added):  # they take all blanks beside them
            return None
        lengths = [len(token) for token in self._tokenizer.get_vocab()]
        lengths += [len(token.content.encode()) for token in added]
        return shrinks * max(lengths)


def _keeps_every_byte(backend: Any) -> bool:
    """Whether a tokenizer spells bytes as letters, has a token for each, and drops no blanks."""
    letters = set(ByteLevel.alphabet())
    if type(backend.decoder).__name__ != "ByteLevel" or not letters <= backend.get_vocab().keys():
        return False
    if not backend.pre_tokenizer:
        return False
    pieces = backend.pre_tokenizer.pre_tokenize_str(_WHITESPACE_SAMPLE)
    num_kept = sum(len(piece) for piece, _ in pieces)
    return num_kept >= len(_WHITESPACE_SAMPLE.encode())


def _check_min_tokens(num_bytes: int, max_tokens: int, max_token_bytes: int) -> None:
    """Raise PromptTooLong if `num_bytes` of text must have more than `max_tokens` tokens."""
    least = -(-num_bytes // max_token_bytes)
    if least > max_tokens:
        raise PromptTooLong(
            max_tokens, f"you sent {num_bytes} bytes of text, which are at least {least} tokens"
        )
