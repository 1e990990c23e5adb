"""Prompts to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from minisgl.core import IntArray
from minisgl.errors import CheckpointError, InvalidRequest, PromptTooLong, RequestError
from minisgl.message import Conversation, Prompt, TokenIds, unpack_ids
from minisgl.tokenizer.detokenize import Detokenizer

_RESERVED = {  # parameters of apply_chat_template that are not variables of the template
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *(
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
    ),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
}


_PROBE = "  \t\r\n a1!é语\u3000  "  # of which some tokenizers drop a part


class Tokenizer:
    """The tokenizer and chat template of a model folder.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import (
            AutoTokenizer,
        )  # here: it takes seconds, and the server need not wait for it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # the library raises whatever its loaders do
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{folder} has no usable tokenizer: {reason}") from error

    def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
    ) -> IntArray:
        """int32 ids of a text, a conversation, or ids as they are.

        Args:
            add_special_tokens: the model's, around the text; None adds them to a text but not to a conversation, whose
                template writes them.
            max_tokens: a text that cannot but have more is refused unread; others may have more too.

        Raises:
            InvalidRequest: the conversation does not suit the template, or there is no template.
            RequestError: the text cannot have as few as `max_tokens`.
        """
        if isinstance(prompt, TokenIds):
            return unpack_ids(prompt.raw)
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        if max_tokens is not None and len(text) > max_tokens and self.max_token_bytes:
            _refuse_hopeless(len(text.encode()), max_tokens, self.max_token_bytes)
        adds = isinstance(prompt, str) if add_special_tokens is None else add_special_tokens
        return np.array(self._tokenizer(text, add_special_tokens=adds)["input_ids"], dtype=np.int32)

    def render(self, conversation: Conversation) -> str:
        """The conversation as the model was trained to read it, open for the assistant's answer unless it says else."""
        reserved = conversation.variables.keys() & _RESERVED
        if reserved:
            raise InvalidRequest(
                f"{sorted(reserved)[0]!r} is not the template's to take",
                param="chat_template_kwargs",
            )
        tools = {"tools": conversation.tools} if conversation.tools else {}
        options = {
            "add_generation_prompt": True,
            **conversation.options,
            **conversation.variables,
            **tools,
        }
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation.messages, tokenize=False, **options
            )
        except (
            Exception
        ) as error:  # a template is a program; whatever it raises is about these messages
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {reason}", param="messages"
            ) from error
        return text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no character become U+FFFD."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def text_of(self, ids: IntArray) -> str:
        """The text that ids stand for, special tokens included.

        Raises:
            InvalidRequest: an id is not of the vocabulary.
        """
        unknown = ids[(ids < 0) | (ids >= self.vocab_size)]
        if unknown.size:
            raise InvalidRequest(f"token id {unknown[0]} is outside [0, {self.vocab_size})")
        text: str = self._tokenizer.decode(
            ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def max_token_bytes(self) -> int | None:
        """UTF-8 of a text that one token can stand for; None where some tokens may swallow any amount.

        Known of vocabularies over bytes only, into which every byte goes. NFC makes a text shorter by 3.5 at most.
        """
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        shrink = {"NoneType": 1, "NFC": 4}.get(type(backend and backend.normalizer).__name__)
        if backend is None or shrink is None or not _keeps_every_byte(backend):
            return None
        added = self._tokenizer.added_tokens_decoder.values()
        if any(token.lstrip or token.rstrip for token in added):
            return None
        return shrink * max(
            *map(len, self._tokenizer.get_vocab()),
            *(len(token.content.encode()) for token in added),
        )

    @cached_property
    def vocab_size(self) -> int:
        """Ids end below it. A vocabulary may have gaps, and the model rows beyond it that stand for nothing."""
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return max(vocab.values()) + 1

    @property
    def chat_template(self) -> str | None:
        """Its text, the one for tools if there are several; None if there is none."""
        if not self._tokenizer.chat_template:
            return None
        text: str = self._tokenizer.get_chat_template(tools=[])
        return text

    @property
    def markers(self) -> dict[str, int]:
        """The tokens that are never split, and their ids."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return added

    def make_detokenizer(self) -> Detokenizer:
        """A detokenizer for this vocabulary."""
        return Detokenizer(
            self.decode, partial(self.decode, skip_special_tokens=False), self.byte_ids
        )

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens that stand for a single byte, in tokenizers that fall back to bytes ("<0x0A>")."""
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return frozenset(vocab[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in vocab)


def _keeps_every_byte(backend: Any) -> bool:
    """Whether a tokenizer spells bytes as letters, has all of them, and drops no blanks."""
    letters = set(ByteLevel.alphabet())
    if type(backend.decoder).__name__ != "ByteLevel" or not letters <= backend.get_vocab().keys():
        return False
    pieces = backend.pre_tokenizer.pre_tokenize_str(_PROBE) if backend.pre_tokenizer else []
    return sum(len(piece) for piece, _ in pieces) >= len(_PROBE.encode())


def _refuse_hopeless(num_bytes: int, max_tokens: int, max_token_bytes: int) -> None:
    least = -(-num_bytes // max_token_bytes)
    if least > max_tokens:
        raise RequestError(
            f"the prompt is {num_bytes} bytes of text, at least {least} tokens; the limit is {max_tokens}",
            code=PromptTooLong.code,
        )
