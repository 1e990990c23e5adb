"""Requests as OpenAI has them: which fields are honoured, and what they become.

A field that would change the output is honoured or refused, never ignored: `Only` marks those that are accepted with a
value that changes nothing, and a field that is not declared is an error that names it.
Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import Conversation, Prompt, TokenIds, pack_ids
from minisgl.server.openai.messages import Message, TextPart
from minisgl.server.openai.structured_output import Guided, ResponseFormat
from minisgl.server.openai.tools import MAX_TOOLS, Function, NamedTool, Tool, ToolUse
from minisgl.server.openai.validation import (
    Limit,
    OfStream,
    Only,
    Schema,
    Strict,
    TokenId,
    TopLogprobs,
    ValidText,
)
from minisgl.server.parsing import Dialect

MAX_ANSWERS = 128
DEFAULT_TEXT_TOKENS = 16


Prompts: TypeAlias = ValidText | list[ValidText] | list[TokenId] | list[list[TokenId]]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(Guided):
    """What all entrances have in common. The last seven fields never change an answer.

    Attributes:
        prompt_field: where the prompt is.
    """

    prompt_field: ClassVar[str] = "prompt"

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: ValidText | list[ValidText] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: ValidText | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    user: ValidText | None = None
    metadata: dict[ValidText, ValidText] | None = None
    store: bool | None = None
    service_tier: ValidText | None = None
    safety_identifier: ValidText | None = None
    prompt_cache_key: ValidText | None = None
    prompt_cache_retention: ValidText | None = None

    @property
    def num_answers(self) -> int:
        """To each prompt."""
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream's chunks have a place for it."""
        return False

    def sampling(self, defaults: dict[str, float]) -> SamplingParams:
        """The request's parameters; what it leaves open comes from the model's recommendation.

        Every field here that `SamplingParams` has under the same name goes there as it is.

        Raises:
            InvalidRequest: a value is outside its bounds.
        """
        given = {field.name: getattr(self, field.name, None) for field in fields(SamplingParams)}
        if self.top_k in (0, -1):  # the ways in which other servers spell "all"
            given["top_k"] = None
            defaults = {name: value for name, value in defaults.items() if name != "top_k"}
        given |= {
            "max_tokens": self.limit,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": {
                _token_id(token): bias for token, bias in (self.logit_bias or {}).items()
            },
            "logprobs": self.num_logprobs,
            "grammar": self.grammar(),
        }
        chosen: dict[str, Any] = defaults | {
            name: value for name, value in given.items() if value is not None
        }
        return SamplingParams(**chosen)

    def constrain(self, sampling: SamplingParams, _dialect: Dialect) -> SamplingParams:
        """The parameters, with what the model's way to call and to think adds to them."""
        return sampling

    def field_of(self, param: str | None) -> str | None:
        """The field of this request behind what a scheduler finds fault with; None is the prompt."""
        if param != "grammar":
            return param or self.prompt_field
        return next((name for name, grammar in self._grammars().items() if grammar), "tools")

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """Tokens of an answer at most."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each; None: not even its own log probability."""

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """What is to be answered.

        Raises:
            InvalidRequest: there is none, or an empty one.
        """


def to_prompts(given: Prompts, field: str = "prompt") -> list[Prompt]:
    """One or several, as texts or ids.

    Raises:
        InvalidRequest: there is none, or an empty one.
    """
    several: list[Any] = given if isinstance(given, list) else [given]
    if several and isinstance(several[0], int):
        several = [several]
    if not several or not all(several):
        raise InvalidRequest("the prompt is empty", param=field)
    return [prompt if isinstance(prompt, str) else TokenIds(pack_ids(prompt)) for prompt in several]


def _at_least_one(limit: int | None) -> int | None:
    if limit == 0:
        raise InvalidRequest("max_tokens must be >= 1, got 0", param="max_tokens")
    return limit


def _token_id(text: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,9}", text):
        raise InvalidRequest(
            f"logit_bias maps token ids in decimal digits, got {text[:40]!r}", param="logit_bias"
        )
    return int(text)


class ChoicesRequest(GenerationRequest):
    """What chat and text completions have in common: there may be several answers to a prompt."""

    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    stream_options: OfStream[StreamOptions] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_answers(self) -> int:
        return self.n or 1

    def sampling(self, defaults: dict[str, float]) -> SamplingParams:
        if self.best_of not in (None, self.num_answers):
            raise InvalidRequest(
                f"best_of must be n ({self.num_answers}), got {self.best_of}",
                param="best_of",
                code="unsupported_parameter",
            )
        return super().sampling(defaults)

    def _grammars(self) -> dict[str, Grammar | None]:
        own = self.response_format.grammar() if self.response_format else None
        return {"response_format": own, **super()._grammars()}


class ConversationRequest(GenerationRequest):
    """What chats and responses have in common: calls of tools, and thoughts before the answer."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Schema | None = None

    def constrain(self, sampling: SamplingParams, dialect: Dialect) -> SamplingParams:
        return dialect.constrain(sampling, self.tool_use, thinks=self.thinks)

    @property
    @abstractmethod
    def offered(self) -> Sequence[Function]:
        """That are offered."""

    @property
    def tool_use(self) -> ToolUse:
        """
        Raises:
            InvalidRequest: the choice does not suit the tools.
        """
        choice: Any = self.tool_choice or "auto"
        named = None if isinstance(choice, str) else choice.name
        return ToolUse(
            self.offered,
            "required" if named else choice,
            named,
            self.parallel_tool_calls is not False,
        )

    @property
    def thinks(self) -> bool:
        """Whether the template lets the model think first, as far as the request says."""
        return (self.chat_template_kwargs or {}).get("enable_thinking", True) is not False


class Prediction(Strict):
    type: Literal["content"]
    content: ValidText | list[TextPart]


class ChatRequest(ConversationRequest, ChoicesRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only()] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only({})] = None

    def prompts(self) -> list[Prompt]:
        messages = [message.plain() for message in self.messages]
        options = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        given = {name: value for name, value in options.items() if value is not None}
        if self.continue_final_message:
            given.setdefault("add_generation_prompt", False)
        return [
            Conversation(
                messages, given, self.chat_template_kwargs or {}, self.tool_use.for_template()
            )
        ]

    @property
    def offered(self) -> list[Function]:
        return [tool.function for tool in self.tools or ()]

    @property
    def thinks(self) -> bool:
        return super().thinks and not self.continue_final_message

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return _at_least_one(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )


class CompletionRequest(ChoicesRequest):
    """POST /v1/completions. Several prompts give several choices."""

    model: str
    prompt: Prompts
    max_tokens: int | None = DEFAULT_TEXT_TOKENS
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[Any, Only("")] = None

    def prompts(self) -> list[Prompt]:
        return to_prompts(self.prompt)

    @property
    def limit(self) -> int | None:
        limit = DEFAULT_TEXT_TOKENS if self.max_tokens is None else self.max_tokens
        return limit if self.echo else _at_least_one(limit)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs(self) -> int | None:
        """What is shown of a prompt has log probabilities as the answer has."""
        return self.logprobs if self.echo else None
