"""Keeps control tokens in a client's texts from having an effect: they are read as text.

A chat template writes control tokens such as `<|im_end|>` around the texts of a conversation. A
text may contain the spelling of one. If it became that token, the text's author could end a
turn and begin another one, such as the system's.

    conversation ─ marks ─▶ template ─▶ marked text ─ stand-ins ─▶ copy of the tokenizer ─▶ ids

* Marks are put before each control token in what the client sent. Control tokens without a mark
  are the template's own, and each is replaced by its stand-in, a text that cannot be guessed.
* The copy of the tokenizer has the stand-ins instead of the control tokens. To it, what the client
  wrote is text. It differs in nothing else, so all other text gets its usual ids.

This does not help where a template makes a control token of a client's text, as in
`'<|' + role + '|>'`; roles are checked before. transformers >= 5.20 can do the same on request, but
encodes each control token apart from the text around it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from msgspec import json, structs
from tokenizers import Tokenizer as Backend

from minisgl.message import Conversation
from minisgl.utils.excerpts import excerpt
from minisgl.utils.token_names import rename_tokens


def _draw_mark() -> str:
    """A text that cannot be guessed, which filters of templates leave as it is."""
    return f"~{secrets.randbits(64):020d}~"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks that are put into the texts of one conversation.

    Attributes:
        before_token: stands before a control token of the client's.
        gap: stands behind the beginning of a control token at the end of a text, which the text
            that the template writes behind it could complete.
    """

    before_token: str = field(default_factory=_draw_mark)
    gap: str = field(default_factory=_draw_mark)

    def remove(self, text: str) -> str:
        return text.replace(self.before_token, "").replace(self.gap, "")


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        backend: the tokenizer; None if it is not one of the library `tokenizers`.
        texts: how the control tokens are spelled.
    """

    def __init__(self, backend: Backend | None, texts: Iterable[str]) -> None:
        longest_first = sorted(set(texts), key=len, reverse=True)
        self._backend = backend
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {text[:size] for text in longest_first for size in range(1, len(text))}
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        secret = secrets.token_hex(16)
        self._stand_ins = {
            text: f"<{secret}:{number}>" for number, text in enumerate(longest_first)
        }

    def get_ready(self) -> None:
        """Copy the tokenizer now. If it cannot be copied, each text that needs it is refused."""
        with suppress(ValueError):
            _ = self._copy

    def mark(self, conversation: Conversation, marks: Marks) -> Conversation:
        """Mark control tokens in all that the client sent.

        Returns:
            A conversation that is equal to the given one if there is nothing to mark.
        """
        return structs.replace(
            conversation,
            messages=self._marked(conversation.messages, marks),
            variables=self._marked(conversation.variables, marks),
            tools=self._marked(conversation.tools, marks),
        )

    def encode(self, marked_text: str, marks: Marks, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of what the template made of a marked conversation.

        Raises:
            ValueError: the tokenizer cannot be copied with stand-ins.
        """
        text = marks.remove(self._with_stand_ins(marked_text, marks))
        ids: list[int] = self._copy.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _marked(self, value: Any, marks: Marks) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, marks)
        if isinstance(value, dict):
            return {
                self._marked(key, marks): self._marked(entry, marks) for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(entry, marks) for entry in value]
        return value

    def _marked_text(self, text: str, marks: Marks) -> str:
        text = self._pattern.sub(lambda match: marks.before_token + match[0], text)
        stem = text.rstrip()  # templates strip texts
        longest = min(len(stem), self._longest_beginning)
        if any(stem[-size:] in self._beginnings for size in range(1, longest + 1)):
            return stem + marks.gap + text[len(stem) :]
        return text

    def _with_stand_ins(self, marked_text: str, marks: Marks) -> str:
        def replace(match: re.Match[str]) -> str:
            is_text = marked_text.endswith(marks.before_token, 0, match.start())
            return match[0] if is_text else self._stand_ins[match[0]]

        return self._pattern.sub(replace, marked_text)

    @cached_property
    def _copy(self) -> Backend:
        """The tokenizer with stand-ins. It is made once: that takes up to a second."""
        if self._backend is None:
            raise ValueError("this model's tokenizer knows control tokens by their texts only")
        renamed = rename_tokens(self._backend.to_str().encode(), self._stand_ins)
        copy = Backend.from_str(json.encode(renamed).decode())
        copy.no_truncation()
        copy.no_padding()
        for text, stand_in in self._stand_ins.items():
            if copy.token_to_id(stand_in) != self._backend.token_to_id(text):
                raise ValueError(f"this model's tokenizer cannot take {excerpt(text)} as text")
        return copy
