"""The common fields of all requests that generate text, and how they become `SamplingParams`.

A known field that would change the output is honoured or refused, never ignored. `NeutralOnly`
marks fields that are refused unless their value changes nothing. A field that is not declared is
ignored, or with --strict-fields refused. Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Self, TypeAlias

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TokenIds, pack_ids
from minisgl.sampling_params import MAX_COUNT, MAX_STOPS
from minisgl.server.requests.prompts import PromptRequest
from minisgl.server.requests.structured_output import (
    ResponseFormat,
    StructuredOutputFields,
    refusals_name,
)
from minisgl.server.requests.tools import Function, ToolUse
from minisgl.server.requests.unsupported import UnsupportedConversationFields, UnsupportedFields
from minisgl.server.requests.validation import (
    FEW_PAIRS,
    MAX_ID,
    AtMost,
    FitsContext,
    Integer,
    RequestBounds,
    RequestContext,
    RequestModel,
    Schema,
    StreamingOnly,
    TokenId,
    ValidText,
)
from minisgl.utils.excerpts import excerpt

MAX_ANSWERS = 128


def _max_prompts(bounds: RequestBounds) -> int:
    return bounds.max_prompts


PromptIds: TypeAlias = Annotated[list[TokenId], FitsContext(int)]
Prompts: TypeAlias = (
    ValidText
    | Annotated[list[ValidText], AtMost(_max_prompts, str)]
    | PromptIds
    | Annotated[list[PromptIds], AtMost(_max_prompts, list)]
)


class GenerationRequest(PromptRequest, StructuredOutputFields, UnsupportedFields):
    """A request that generates text. The last seven fields never change an answer.

    A field that `SamplingParams` has under the same name is passed on as it is.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    stop: ValidText | Annotated[list[ValidText], AtMost(MAX_STOPS)] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[Integer, Field(ge=0, le=MAX_ID)]], AtMost(MAX_STOPS)] | None
    ) = None
    min_tokens: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], FEW_PAIRS] | None = None
    ignore_eos: bool | None = None
    priority: Integer | None = None
    cache_salt: ValidText | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    user: ValidText | None = None
    metadata: Annotated[dict[ValidText, ValidText], FEW_PAIRS] | None = None
    store: bool | None = None
    service_tier: ValidText | None = None
    safety_identifier: ValidText | None = None
    prompt_cache_key: ValidText | None = None
    prompt_cache_retention: ValidText | None = None

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether the chunks of a stream have a field for usage."""
        return False

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return False

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """The largest number of tokens of an answer."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each token; None means no logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt."""
        return None

    def sampling(self, defaults: dict[str, float]) -> SamplingParams:
        """The parameters of the request; `defaults` are the model's, for fields that are left out.

        Raises:
            InvalidRequest: a value is outside its bounds.
        """
        given = {field.name: getattr(self, field.name, None) for field in fields(SamplingParams)}
        given["max_tokens"] = self.token_limit
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["logit_bias"] = _parse_logit_bias(self.logit_bias or {})
        given["logprobs"] = self.num_logprobs
        given["prompt_logprobs"] = self.num_prompt_logprobs
        given["grammar"] = self.grammar()
        if self.top_k in (0, -1):  # other servers' values for "all tokens"
            given["top_k"] = None
            defaults = {name: value for name, value in defaults.items() if name != "top_k"}

        chosen: dict[str, Any] = {**defaults}
        chosen.update({name: value for name, value in given.items() if value is not None})
        return SamplingParams(**chosen)

    def field_of(self, param: str | None) -> str | None:
        """The field that a parameter of the engine comes from; None stands for the prompt."""
        if param != "grammar":
            return param or self.prompt_field
        return next(iter(self.grammar_of_field()), "tools")


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ChoicesRequest(GenerationRequest):
    """Fields of chat and text completions: a prompt may have several answers."""

    max_tokens: Integer | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_ANSWERS)] | None = None
    best_of: Integer | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamingOnly[StreamOptions] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_answers(self) -> int:
        return self.n or 1

    def sampling(self, defaults: dict[str, float]) -> SamplingParams:
        if self.best_of not in (None, self.num_answers):
            raise InvalidRequest(
                f"best_of must be n ({self.num_answers}), got {excerpt(self.best_of)}",
                param="best_of",
                code="unsupported_parameter",
            )
        return super().sampling(defaults)

    def grammar_of_field(self) -> dict[str, Grammar]:
        with refusals_name("response_format"):
            format_grammar = self.response_format.grammar() if self.response_format else None
        if format_grammar is None:
            return super().grammar_of_field()
        return {"response_format": format_grammar, **super().grammar_of_field()}


class ConversationRequest(GenerationRequest, UnsupportedConversationFields):
    """Fields of chats and responses: tool calls, and reasoning before the answer."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Schema | None = None
    _always_reasons: bool = PrivateAttr(False)

    @property
    @abstractmethod
    def functions_of_tools(self) -> Sequence[Function]:
        """The functions of `tools`."""

    @property
    def tool_use(self) -> ToolUse:
        """
        Raises:
            InvalidRequest: the choice does not suit the tools.
        """
        choice: Any = self.tool_choice or "auto"
        named_tool = None
        if not isinstance(choice, str):
            named_tool = choice.name
            choice = "required"
        is_parallel = self.parallel_tool_calls is not False
        return ToolUse(self.functions_of_tools, choice, named_tool, is_parallel)

    @property
    def effort(self) -> str | None:
        """How much the model should reason; "none" is not at all."""
        return None

    @model_validator(mode="after")
    def _note_reasoning(self, info: ValidationInfo) -> Self:
        context: RequestContext | None = info.context
        self._always_reasons = RequestBounds.of(info).always_reasons
        if self.effort is not None and context and not context.bounds.has_reasoning_switch:
            context.ignore(type(self).__name__, ["reasoning_effort"])
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template. Those in the request take precedence over effort."""
        variables: dict[str, Any] = {}
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
            variables["enable_thinking"] = self.effort != "none"
        return {**variables, **(self.chat_template_kwargs or {})}

    @property
    def allows_reasoning(self) -> bool:
        """Whether the chat template lets the model reason first, as far as the request says."""
        return (
            self._always_reasons
            or self.template_variables.get("enable_thinking", True) is not False
        )


def parse_prompts(given: Prompts, field: str = "prompt") -> list[Prompt]:
    """One prompt or several, as texts or ids.

    Raises:
        InvalidRequest: there is no prompt, or an empty one.
    """
    several: list[Any] = given if isinstance(given, list) else [given]
    if several and isinstance(several[0], int):
        several = [several]
    if not several or not all(several):
        raise InvalidRequest("the prompt is empty", param=field)
    return [prompt if isinstance(prompt, str) else TokenIds(pack_ids(prompt)) for prompt in several]


def check_max_tokens(max_tokens: int | None) -> int | None:
    """Check `max_tokens` of an answer that must not be empty."""
    if max_tokens is not None and not 1 <= max_tokens <= MAX_COUNT:
        raise InvalidRequest(
            f"max_tokens must be in [1, {MAX_COUNT}], got {excerpt(max_tokens)}",
            param="max_tokens",
        )
    return max_tokens


def _parse_logit_bias(bias_of_text: dict[str, float]) -> dict[int, float]:
    return {_parse_token_id(text): bias for text, bias in bias_of_text.items()}


def _parse_token_id(text: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]*", text):
        raise InvalidRequest(
            f"logit_bias maps token ids in decimal digits, got {text[:40]!r}", param="logit_bias"
        )
    return int(text[:40])  # Python reads no thousands of digits, and so many are too large anyway
