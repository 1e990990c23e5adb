"""Prompts to token ids.

The chat template makes a text of a conversation first (`chat_template.py`). Control tokens in what
the client sent stay text (`control_tokens.py`), and a text that is too long is refused before it is
tokenized (`length_check.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.checkpoint.auto_tokenizer import load_tokenizer
from minisgl.checkpoint.files import (
    MAX_TOKENIZER_BYTES,
    check_tokenizer_files,
    is_panic,
    one_line,
    read_json,
    read_text,
)
from minisgl.config import TokenizerOptions
from minisgl.core import IntArray
from minisgl.errors import CheckpointError, InvalidRequest, RequestError
from minisgl.message import Conversation, Prompt, TokenIds, unpack_ids
from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.control_tokens import ControlTokens, Marks
from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.length_check import LengthCheck
from minisgl.tokenizer.vocabulary import Vocabulary

_DEFAULTS = TokenizerOptions()
_JSON_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)


class Tokenizer:
    """The tokenizer and chat template of a model folder.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path, options: TokenizerOptions = _DEFAULTS) -> None:
        if not folder.is_dir():  # the library would take its path for a hub id
            raise CheckpointError(f"the model's folder {folder} does not exist")
        check_tokenizer_files(folder)
        try:
            self._tokenizer: Any = load_tokenizer(folder)
        except CheckpointError:
            raise
        except BaseException as error:  # the library raises whatever its loaders do
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise _explained(error, folder) from error
        # Whether a prompt is too long is said by the scheduler. The library would only warn of it.
        self._tokenizer.model_max_length = sys.maxsize
        self.template = ChatTemplate(
            self._tokenizer, falls_back_to_hermes=options.falls_back_to_hermes
        )
        self.length_check = LengthCheck(self._tokenizer)
        self._allow_control_tokens = options.allow_control_tokens

    def get_ready(self, max_tokens: int | None = None) -> None:
        """Do once, and now, what the first prompts of each kind would wait for.

        It is the template's compilation, tables of the vocabulary, and a copy of the tokenizer. The
        copy takes up to a second.

        Args:
            max_tokens: as for `encode`, of what the template makes of a short chat.
        """
        self.length_check.get_ready()
        self.text_of(self.encode("-"))
        if self.template.text is not None:
            with suppress(RequestError):  # some templates refuse such a conversation
                self.encode(Conversation([{"role": "user", "content": "-"}]), max_tokens=max_tokens)
            if not self._allow_control_tokens:
                self._control_tokens.get_ready()

    def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
    ) -> IntArray:
        """Return the int32 ids of a text or a conversation, or given ids as they are.

        Args:
            add_special_tokens: the model's, around the text. None adds them to a text but not to a
                conversation, whose template writes them.
            max_tokens: a text that must have more tokens is refused before it is tokenized, or
                while a piece of it is. Other prompts may have more.

        Raises:
            InvalidRequest: the template refuses the conversation, or there is no template; a value
                in it is nested too deeply; or the text has half a surrogate pair.
            PromptTooLong: the text must have more than `max_tokens` tokens.
        """
        if isinstance(prompt, TokenIds):
            return unpack_ids(prompt.raw)
        try:
            return self._encode(prompt, add_special_tokens, max_tokens)
        except RecursionError:
            raise InvalidRequest("a value is nested too deeply", param="messages") from None

    def _encode(
        self, prompt: str | Conversation, add_special_tokens: bool | None, max_tokens: int | None
    ) -> IntArray:
        if add_special_tokens is None:
            add_special_tokens = isinstance(prompt, str)
        # A control token that the client wrote must stay text: mark it, render, and then encode
        # with stand-ins for the template's own control tokens.
        if isinstance(prompt, Conversation) and not self._allow_control_tokens:
            marks = Marks()
            marked = self._control_tokens.mark(prompt, marks)
            if marked != prompt:
                text = self._render_marked(marked, marks)
                _check_unicode(text)
                self.length_check.check(marks.remove(text), max_tokens)
                return self._encode_marked(text, marks, add_special_tokens)
        text = prompt if isinstance(prompt, str) else self.template.render(prompt)
        _check_unicode(text)
        self.length_check.check(text, max_tokens)
        encoding = self._tokenizer(text, add_special_tokens=add_special_tokens)
        return np.array(encoding["input_ids"], dtype=np.int32)

    def _render_marked(self, marked: Conversation, marks: Marks) -> str:
        try:
            return self.template.render(marked)
        except InvalidRequest as error:  # the template may quote a text
            raise InvalidRequest(marks.remove(str(error)), param=error.param) from error

    def _encode_marked(self, text: str, marks: Marks, add_special_tokens: bool) -> IntArray:
        try:
            ids = self._control_tokens.encode(text, marks, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise InvalidRequest(
                f"a text contains a control token, but {error}", param="messages"
            ) from error
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are no character become U+FFFD."""
        return self._vocabulary.decode(ids, skip_special_tokens=skip_special_tokens)

    def text_of(self, ids: IntArray) -> str:
        """Return the text of ids with special tokens written out.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        unknown = ids[(ids < 0) | (ids >= self.vocab_size)]
        if unknown.size:
            raise InvalidRequest(f"token id {unknown[0]} is outside [0, {self.vocab_size})")
        return self.decode(ids.tolist(), skip_special_tokens=False)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        """Special tokens, and added tokens that the chat template writes.

        Other added tokens are words or blanks to their models.
        """
        written_texts = self.template.written_texts
        added = self._tokenizer.added_tokens_decoder.values()
        written = [token for token in added if token.content in written_texts]
        controls = [token.content for token in added if token.special]
        controls += [token.content for token in written if token.content.strip()]
        return ControlTokens(getattr(self._tokenizer, "backend_tokenizer", None), controls)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. There may be gaps below; a model may have rows beyond it."""
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return max(vocab.values()) + 1

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are never split, such as `<|im_end|>`, by their texts."""
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        return added

    def make_detokenizer(self) -> Detokenizer:
        """A detokenizer for this vocabulary."""
        return Detokenizer(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer)


def _explained(error: BaseException, folder: Path) -> CheckpointError:
    """What a user reads in place of an error of the library, which names no file."""
    from tokenizers import Tokenizer as TokenizerFile
    from transformers import AutoConfig

    vocabulary = folder / "tokenizer.json"
    options = folder / "tokenizer_config.json"
    config = folder / "config.json"
    reason = one_line(error)
    try:
        _read_all(folder)
    except CheckpointError as unreadable:
        return unreadable
    if reason == _fault(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False)):
        return CheckpointError(f"{config}: {reason}")
    if vocabulary.exists():
        damage = _fault(lambda: TokenizerFile.from_file(str(vocabulary)))
        if damage is not None:
            return CheckpointError(f"{vocabulary} is no tokenizer: {damage}")
        if options.exists():
            return CheckpointError(f"{options} does not fit {vocabulary.name}: {reason}")
    return CheckpointError(f"{folder} has no usable tokenizer: {reason}")


def _read_all(folder: Path) -> None:
    """Read each file that the library reads where it is there.

    Raises:
        CheckpointError: one is no text, or no JSON.
    """
    for path in filter(Path.exists, (folder / name for name in _JSON_FILES)):
        read_json(path, MAX_TOKENIZER_BYTES)
    for pattern in ("*.jinja", "additional_chat_templates/*.jinja"):
        for path in folder.glob(pattern):
            read_text(path, MAX_TOKENIZER_BYTES)


def _fault(read: Callable[[], object]) -> str | None:
    """Why a library does not read a file; None if it does."""
    try:
        read()
    except BaseException as error:  # it raises whatever its checks do
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return one_line(error)
    return None


def _check_unicode(text: str) -> None:
    """
    Raises:
        InvalidRequest: no tokenizer takes the text, which has no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text has half a surrogate pair at {error.start}") from None
