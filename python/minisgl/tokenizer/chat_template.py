"""From a conversation to the text of its prompt, by the model's chat template."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError

from minisgl.errors import InvalidRequest
from minisgl.message import ChatMessage, Conversation
from minisgl.tokenizer.tool_prompt import HERMES_TEXTS, call_format_of, describe_tools
from minisgl.utils.excerpts import excerpt

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
_QUESTION: ChatMessage = {"role": "user", "content": "-"}
# The chats that say what a template does.
_SHORT_CHAT = Conversation([_QUESTION])
_CHAT_WITH_SYSTEM = Conversation([{"role": "system", "content": _PROBE}, _QUESTION])
_CHATS_WITH_TOOLS = (
    Conversation([_QUESTION], tools=[_PROBE_TOOL]),
    Conversation([{"role": "system", "content": "-"}, _QUESTION], tools=[_PROBE_TOOL]),
)


class ChatTemplate:
    """The chat template of a tokenizer, if it has one.

    Where it shows no tools, a system text describes them (`tool_prompt.py`).

    Args:
        tokenizer: of transformers.
        falls_back_to_hermes: as in `TokenizerOptions`.

    Attributes:
        bound: limits the time and memory of one chat, by an error; by default there is no limit.
    """

    bound: Callable[[], AbstractContextManager[None]]

    def __init__(self, tokenizer: Any, *, falls_back_to_hermes: bool) -> None:
        self._tokenizer = tokenizer
        self._falls_back_to_hermes = falls_back_to_hermes
        self.bound = nullcontext

    def render(self, conversation: Conversation) -> str:
        """Apply the chat template. By default the text ends where the answer begins.

        Raises:
            InvalidRequest: the template refuses the conversation, or there is no template.
        """
        if self.describes_tools:
            conversation = describe_tools(conversation, has_system=self._has_system)
        return self._apply(conversation)

    def _apply(self, conversation: Conversation) -> str:
        reserved = sorted(conversation.variables.keys() & _RESERVED)
        if reserved:
            raise InvalidRequest(
                f"{excerpt(reserved[0])} is not the template's to take",
                param="chat_template_kwargs",
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
        if self._misdeclared is not None:
            raise _refusal_of_damaged(self._misdeclared)
        if self.lack is not None and not conversation.tools:
            raise InvalidRequest(
                f"chats without tools are not possible: {self.lack}", param="messages"
            )
        try:
            with self.bound():
                text: str = self._tokenizer.apply_chat_template(
                    conversation.messages, tokenize=False, **options
                )
        except TemplateSyntaxError as error:
            raise _refusal_of_damaged(_located(error)) from error
        except Exception as error:  # a template is a program; it raises what its author chose
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {reason}", param="messages"
            ) from error
        return text

    @property
    def text(self) -> str | None:
        """The text of the template, or of the one for tools; None without a template of texts."""
        if not self._tokenizer.chat_template or self._misdeclared is not None:
            return None
        text: str = self._tokenizer.get_chat_template(tools=[])
        return text

    @property
    def _misdeclared(self) -> str | None:
        """Why what the folder declares is no template, or no templates by their names."""
        declared = self._tokenizer.chat_template
        if not declared:
            return None
        templates = declared if isinstance(declared, dict) else {"default": declared}
        for template in templates.values():
            if not isinstance(template, str):
                return f"it must be a text, got {excerpt(template)}"
        if not templates.keys() & {"default", "tool_use"}:
            return "there are several, and none is named default"
        return None

    @property
    def lack(self) -> str | None:
        """Why chats with tools have a template and others have none; None if that is not so."""
        declared = self._tokenizer.chat_template
        if self._misdeclared is not None or not isinstance(declared, dict):
            return None
        if "default" in declared:
            return None
        return "the model has a chat template for tools, and none is named default"

    @property
    def damage(self) -> str | None:
        """Why the template cannot be compiled; None if it can."""
        if self._misdeclared is not None:
            return self._misdeclared
        return self._damage_for(_SHORT_CHAT)

    @property
    def damage_for_tools(self) -> str | None:
        """The same of a template for tools beside or without another; None if there is none."""
        declared = self._tokenizer.chat_template
        if self._misdeclared is not None or not isinstance(declared, dict):
            return None
        return self._damage_for(_CHATS_WITH_TOOLS[0]) if "tool_use" in declared else None

    def _damage_for(self, conversation: Conversation) -> str | None:
        try:
            self._apply(conversation)
        except InvalidRequest as refusal:
            if isinstance(refusal.__cause__, TemplateSyntaxError):
                return _located(refusal.__cause__)
        return None

    def write_short_chats(self) -> None:
        """Write each chat that says what the template does. It may refuse them.

        Raises:
            MemoryError: it gets no more memory.
        """
        for chat in (_SHORT_CHAT, _CHAT_WITH_SYSTEM, *_CHATS_WITH_TOOLS):
            try:
                self._apply(chat)
            except InvalidRequest as refusal:
                if isinstance(refusal.__cause__, MemoryError):
                    raise refusal.__cause__ from None

    @cached_property
    def describes_tools(self) -> bool:
        """Whether tools are described in a system text, since the template cannot show them."""
        template = self.text
        if template is None or self.lack is not None:
            return False
        if self._falls_back_to_hermes and call_format_of(template) is None:
            return True
        return not any(self._shows(_PROBE, chat) for chat in _CHATS_WITH_TOOLS)

    @property
    def shows_tools(self) -> bool:
        """Whether a template shows tools itself; it may be another one than that of other chats."""
        return self.text is not None and not self.describes_tools

    @property
    def call_format(self) -> str | None:
        """The name of the format in which prompts have calls of tools, if it is known."""
        if self.describes_tools:
            return "hermes"
        return None if self.text is None else call_format_of(self.text)

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template takes a turn of the system and shows it."""
        return self._shows(_PROBE, _CHAT_WITH_SYSTEM)

    def _shows(self, text: str, conversation: Conversation) -> bool:
        """Whether the prompt of a conversation has a text."""
        try:
            return text in self._apply(conversation)
        except InvalidRequest:  # some templates need or refuse a system's turn
            return False

    @property
    def written_texts(self) -> str:
        """All texts that it may write of itself, and those that describe tools in its place."""
        text = str(self._tokenizer.chat_template)  # or several templates, by their names
        return text + "".join(HERMES_TEXTS) if self.describes_tools else text


def _refusal_of_damaged(damage: str) -> InvalidRequest:
    return InvalidRequest(
        f"the chat is not possible, the model's chat template is damaged: {damage}",
        param="messages",
    )


def _located(error: TemplateSyntaxError) -> str:
    return f"line {error.lineno}: {error.message}"
