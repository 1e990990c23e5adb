"""Prompts to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from minisgl.checkpoint.files import check_tokenizer_files, is_panic
from minisgl.core import IntArray
from minisgl.errors import CheckpointError, InvalidRequest, PromptTooLong
from minisgl.message import Conversation, Prompt, TokenIds, unpack_ids
from minisgl.tokenizer.control_tokens import ControlTokens, Marks
from minisgl.tokenizer.detokenize import Detokenizer
from minisgl.tokenizer.tool_prompt import HERMES_TEXTS, call_format_of, describe_tools
from minisgl.tokenizer.vocabulary import Vocabulary

_RESERVED = {  # parameters of apply_chat_template that are not variables of the template
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "processor_kwargs",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
_PROBE = "probe_of_the_template"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "-",
        "parameters": {"type": "object", "properties": {}},
    },
}
_USUAL_CHARACTERS = 8  # of a token, at most; a longer text is looked at piece by piece
_PIECE = 2**14  # characters
_PIECE_SLACK = 256  # tokens
_WHITESPACE_SAMPLE = "  \t\r\n a1!é语\u3000  "  # some pre-tokenizers drop a part of it
_NORMALIZER_SHRINKS = {  # how many times shorter a normalizer can make the UTF-8 of a text
    "NoneType": 1,
    "NFC": 4,  # by 3.5 at most
}


class Tokenizer:
    """The tokenizer and chat template of a model folder.

    Args:
        allow_control_tokens: whether control tokens in the texts of a conversation are more than
            text. In a text alone they always are.
        needs_known_calls: whether calls of tools have to be written in a form that can be parsed,
            also where the chat template has another.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """

    def __init__(
        self, folder: Path, *, allow_control_tokens: bool = False, needs_known_calls: bool = False
    ) -> None:
        # Imported here: it takes seconds, and the API server need not wait for it.
        from transformers import AutoTokenizer

        check_tokenizer_files(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except BaseException as error:  # the library raises whatever its loaders do
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise CheckpointError(f"{folder} has no usable tokenizer: {reason}") from error
        self._allow_control_tokens = allow_control_tokens
        self._needs_known_calls = needs_known_calls

    def get_ready(self) -> None:
        """Do once, and now, what the first prompts of each kind would wait for.

        It is the template's compilation, tables of the vocabulary, and a copy of the tokenizer. The
        copy takes up to a second.
        """
        _ = self.max_token_bytes
        self.text_of(self.encode("-"))
        if self.chat_template is not None:
            with suppress(InvalidRequest):  # some templates refuse such a conversation
                self.encode(Conversation([{"role": "user", "content": "-"}]))
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
            InvalidRequest: the template refuses the conversation, or there is no template.
            PromptTooLong: the text must have more than `max_tokens` tokens.
        """
        if isinstance(prompt, TokenIds):
            return unpack_ids(prompt.raw)
        if add_special_tokens is None:
            add_special_tokens = isinstance(prompt, str)
        if isinstance(prompt, Conversation) and not self._allow_control_tokens:
            marks = Marks()
            marked = self._control_tokens.mark(prompt, marks)
            if marked != prompt:
                text = self._render_marked(marked, marks)
                self._check_length(marks.remove(text), max_tokens)
                return self._encode_marked(text, marks, add_special_tokens)
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        self._check_length(text, max_tokens)
        encoding = self._tokenizer(text, add_special_tokens=add_special_tokens)
        return np.array(encoding["input_ids"], dtype=np.int32)

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and len(text) > max_tokens and self.max_token_bytes:
            _check_min_tokens(len(text.encode()), max_tokens, self.max_token_bytes)
        if max_tokens is not None and len(text) > _USUAL_CHARACTERS * max_tokens + _PIECE:
            self._check_pieces(text, max_tokens)

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Raise PromptTooLong if the pieces of a text have twice as many tokens as it may have.

        A cut adds a few tokens and never so many. Tokenizing a text as a whole takes hundreds of
        bytes of memory a token, and more time than others should wait for.
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

    def _render_marked(self, marked: Conversation, marks: Marks) -> str:
        try:
            return self.render(marked)
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

    def render(self, conversation: Conversation) -> str:
        """Apply the chat template. By default the text ends where the answer begins.

        Raises:
            InvalidRequest: the template refuses the conversation, or there is no template.
        """
        if self.describes_tools:
            conversation = describe_tools(conversation, has_system=self._has_system)
        return self._apply_template(conversation)

    def _apply_template(self, conversation: Conversation) -> str:
        reserved = sorted(conversation.variables.keys() & _RESERVED)
        if reserved:
            raise InvalidRequest(
                f"{reserved[0]!r} is not the template's to take", param="chat_template_kwargs"
            )
        options: dict[str, Any] = {
            "add_generation_prompt": True,
            **conversation.options,
            **conversation.variables,
        }
        if conversation.tools:
            options["tools"] = conversation.tools
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation.messages, tokenize=False, **options
            )
        except Exception as error:  # a template is a program; it raises what its author chose
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {reason}", param="messages"
            ) from error
        return text

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
        template = str(self._tokenizer.chat_template)  # or several templates, by their names
        if self.describes_tools:
            template += "".join(HERMES_TEXTS)
        added = self._tokenizer.added_tokens_decoder.values()
        written = [token for token in added if token.content in template]
        controls = [token.content for token in added if token.special]
        controls += [token.content for token in written if token.content.strip()]
        return ControlTokens(getattr(self._tokenizer, "backend_tokenizer", None), controls)

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

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. There may be gaps below; a model may have rows beyond it."""
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return max(vocab.values()) + 1

    @property
    def chat_template(self) -> str | None:
        """The template's text, of several the one for tools; None if there is none."""
        if not self._tokenizer.chat_template:
            return None
        text: str = self._tokenizer.get_chat_template(tools=[])
        return text

    @cached_property
    def describes_tools(self) -> bool:
        """Whether tools are described in a system text, since the template cannot show them."""
        template = self.chat_template
        if template is None:
            return False
        if self._needs_known_calls and call_format_of(template) is None:
            return True
        question = {"role": "user", "content": "-"}
        conversations = [[question], [{"role": "system", "content": "-"}, question]]
        return not any(
            self._shows(_PROBE, Conversation(messages, tools=[_PROBE_TOOL]))
            for messages in conversations
        )

    @property
    def call_format(self) -> str | None:
        """The name of the format in which prompts have calls of tools, if it is known."""
        if self.describes_tools:
            return "hermes"
        return None if self.chat_template is None else call_format_of(self.chat_template)

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template takes a turn of the system and shows it."""
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "-"}]
        return self._shows(_PROBE, Conversation(messages))

    def _shows(self, text: str, conversation: Conversation) -> bool:
        """Whether the prompt of a conversation has a text."""
        try:
            return text in self._apply_template(conversation)
        except InvalidRequest:  # some templates need or refuse a system's turn
            return False

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
    """Raise PromptTooLong if a text of so many bytes must have more than `max_tokens` tokens."""
    least = -(-num_bytes // max_token_bytes)
    if least > max_tokens:
        raise PromptTooLong(
            max_tokens, f"you sent {num_bytes} bytes of text, which are at least {least} tokens"
        )
