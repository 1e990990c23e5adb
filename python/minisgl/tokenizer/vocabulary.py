"""The bytes of each token, and how a tokenizer joins several tokens to a text.

Two families of tokenizers have tokens that are bytes whatever comes before them. Byte-level ones
spell bytes as letters (GPT-2). Those of sentencepiece spell a space as ▁, and bytes that no piece
has as <0x0A>. `Vocabulary.spelling` says which one it is. Of other tokenizers only `decode` knows
what a text is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = ["Replace", "ByteFallback", "Fuse"]
_STRIP_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the pieces of a tokenizer spell bytes.

    Attributes:
        bytes_of: a piece to its bytes.
        errors: what becomes of bytes that are no character, as `bytes.decode` takes it. With
            "replace" a broken character is one U+FFFD, with "surrogateescape" each of its bytes is
            to become one.
        strips_space: whether a space at the beginning of a text is left out.
    """

    bytes_of: Callable[[str], bytes]
    errors: Literal["replace", "surrogateescape"]
    strips_space: bool


class Vocabulary:
    """The tokens of a tokenizer. Results are kept: at most one entry per token.

    Attributes:
        spelling: None if the tokenizer is of neither family.
        bytes_of: a token to its bytes, special tokens written out; none for an unknown id.
        visible_bytes_of: the same, but none for special tokens too.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(tokenizer)
        self.spelling = _spelling_of(tokenizer)
        self.bytes_of = cache(self._bytes_of)
        self.visible_bytes_of = cache(self._visible_bytes_of)

    def spell_all(self) -> None:
        """Ask for the bytes of all tokens now, so that memory does not grow as tokens come.

        Of 150,000 tokens that takes half a second. Tokens that only `decode` knows take longer, and
        are asked for as they come.
        """
        if self.spelling is None:
            return
        for token in range(len(self._tokenizer)):
            self.visible_bytes_of(token)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens as the tokenizer says it, as a whole."""
        text: str = self._tokenizer.decode(
            tokens,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def is_known(self, token: int) -> bool:
        """Whether there is such a token; a model may have rows beyond its tokenizer's."""
        return self._tokenizer.convert_ids_to_tokens(token) is not None

    def is_visible(self, token: int) -> bool:
        """Whether there is such a token and it is not a special one."""
        return token not in self._special_ids and self.is_known(token)

    def _bytes_of(self, token: int) -> bytes:
        if self.spelling is None:
            return self.decode([token], skip_special_tokens=False).encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return b"" if piece is None else self.spelling.bytes_of(piece)

    def _visible_bytes_of(self, token: int) -> bytes:
        return b"" if token in self._special_ids else self.bytes_of(token)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that `skip_special_tokens` leaves out."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return frozenset(token for token, content in added.items() if content.special)


def _spelling_of(tokenizer: Any) -> Spelling | None:
    """How a tokenizer spells bytes, as its decoder says it; None if that is of neither family."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(_byte_level_bytes, "replace", strips_space=False)
    if kinds[:3] != _SENTENCEPIECE or steps[3:] not in ([], [_STRIP_SPACE]):
        return None
    pattern = steps[0]["pattern"].get("String")
    if pattern is None:
        return None
    content = steps[0]["content"]

    def bytes_of(piece: str) -> bytes:
        # Rust's tokenizers replace first, and look for bytes then.
        return _sentencepiece_bytes(piece.replace(pattern, content))

    return Spelling(bytes_of, "surrogateescape", strips_space=bool(steps[3:]))


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as tokenizer.json has them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's spelling: a printable byte is its own letter, the others are letters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in sorted(printable)}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level_bytes(piece: str) -> bytes:
    byte_of_letter = _byte_of_letter()
    if any(letter not in byte_of_letter for letter in piece):  # an added token, which is a text
        return piece.encode()
    return bytes(byte_of_letter[letter] for letter in piece)


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.encode()
