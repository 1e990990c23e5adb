"""POST /v1/messages: the request, and the conversation that it becomes.

Next to read: `messages.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from minisgl.core import Grammar, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.message import ChatMessage, Conversation, Prompt
from minisgl.sampling_params import MAX_STOPS
from minisgl.server.anthropic.turns import AssistantTurn, TextBlocks, Turn, text_of
from minisgl.server.requests.generation_request import ConversationRequest
from minisgl.server.requests.structured_output import schema_grammar
from minisgl.server.requests.tools import (
    MAX_TOOLS,
    Function,
    Parameters,
    ToolName,
    ToolUse,
)
from minisgl.server.requests.unsupported import (
    EmptyListOnly,
    FalseOnly,
    OneOnly,
    Refused,
    TrueOnly,
    ZeroOnly,
)
from minisgl.server.requests.validation import (
    FEW_PAIRS,
    FITS_CONTEXT,
    AtMost,
    NeutralOnly,
    RequestModel,
    Schema,
    TokenLimit,
    ValidText,
)


def _drop_null_keywords(schema: Any) -> Any:
    """A schema without the two keywords that may be null in Anthropic's API, where they are."""
    if not isinstance(schema, dict):
        return schema
    absent = [name for name in ("properties", "required") if schema.get(name) is None]
    return {name: value for name, value in schema.items() if name not in absent}


class ToolDefinition(RequestModel):
    """A tool of the client. Tools that Anthropic's servers run are refused by their type."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: ValidText | None = None
    input_schema: Annotated[Parameters, BeforeValidator(_drop_null_keywords)]
    strict: bool | None = None
    cache_control: Any = None

    def function(self) -> Function:
        return Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicNamedTool(RequestModel):
    """The choice of one tool."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model reasons first, where its chat template can choose.

    A budget is accepted and ignored: the template cannot be told how much to reason. Omitted
    reasoning leaves an empty block.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")

    def grammar(self) -> Grammar:
        return schema_grammar(self.schema_)


class OutputConfig(RequestModel):
    """The format of the answer. The effort cannot be chosen."""

    format: OutputFormat | None = None
    effort: ValidText | None = None
    task_budget: Refused = None


def _drop_nulls(value: Any) -> Any:
    """An object without its fields that are null."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class _AnthropicRequest(ConversationRequest):
    """A conversation in Anthropic's form."""

    prompt_field: ClassVar[str] = "messages"
    other_prompt_fields: ClassVar[tuple[str, ...]] = ("system",)

    model: str
    messages: Annotated[list[Turn], Field(min_length=1), FITS_CONTEXT]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolDefinition], AtMost(MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[AnthropicToolChoice | AnthropicNamedTool, Field(discriminator="type")] | None
    ) = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: (
        Annotated[dict[ValidText, ValidText], FEW_PAIRS, BeforeValidator(_drop_nulls)] | None
    ) = None
    billing_policy: Any = None
    cache_control: Any = None
    speed: Any = None
    mcp_servers: EmptyListOnly = None
    thread: Refused = None

    # Fields of other endpoints.
    add_generation_prompt: TrueOnly = None
    best_of: OneOnly = None
    continue_final_message: Annotated[
        Any, NeutralOnly(False, instead="a last turn of the assistant")
    ] = None
    conversation: Refused = None
    input: Annotated[Any, NeutralOnly(instead="messages")] = None
    instructions: Annotated[Any, NeutralOnly(instead="system")] = None
    logprobs: FalseOnly = None
    max_completion_tokens: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    max_output_tokens: Annotated[Any, NeutralOnly(instead="max_tokens")] = None
    n: OneOnly = None
    previous_response_id: Refused = None
    prompt: Annotated[Any, NeutralOnly(instead="messages")] = None
    reasoning: Annotated[Any, NeutralOnly({}, instead="thinking")] = None
    reasoning_effort: Annotated[Any, NeutralOnly(instead="thinking")] = None
    response_format: Annotated[
        Any, NeutralOnly({"type": "text"}, instead="output_config.format")
    ] = None
    text: Annotated[Any, NeutralOnly(instead="output_config.format")] = None
    top_logprobs: ZeroOnly = None
    truncation: Annotated[Any, NeutralOnly("disabled")] = None

    def placeholder(self) -> Any:
        last_role = self.messages[-1].role  # which says whether the answer has begun
        return [{"role": last_role, "content": "-"}]

    def read_prompts(self) -> list[Prompt]:
        return [
            Conversation(
                self.chat_messages(),
                self._template_options(),
                self.template_variables,
                self.tool_use.for_template(),
            )
        ]

    def chat_messages(self) -> list[ChatMessage]:
        """The system text and the turns as a chat."""
        messages: list[ChatMessage] = []
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system)})
        for turn in self.messages:
            turn.add_to(messages)
        return messages

    def _template_options(self) -> dict[str, bool]:
        if not self._continues_answer:
            return {}
        return {"add_generation_prompt": False, "continue_final_message": True}

    @property
    def template_variables(self) -> dict[str, Any]:
        variables = dict(super().template_variables)
        if self.thinking is not None:
            variables.setdefault("enable_thinking", self.thinking.type != "disabled")
        return variables

    @property
    def _continues_answer(self) -> bool:
        """Whether the last turn is the beginning of the answer."""
        return isinstance(self.messages[-1], AssistantTurn)

    @property
    def functions_of_tools(self) -> list[Function]:
        return [tool.function() for tool in self.tools or ()]

    @property
    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        named_tool = choice.name if isinstance(choice, AnthropicNamedTool) else None
        is_parallel = self.parallel_tool_calls is not False and not choice.disable_parallel_tool_use
        return ToolUse(self.functions_of_tools, _CHOICES[choice.type], named_tool, is_parallel)

    @property
    def allows_reasoning(self) -> bool:
        return super().allows_reasoning and not self._continues_answer

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def token_limit(self) -> int | None:
        return None


class CountTokensRequest(_AnthropicRequest):
    """POST /v1/messages/count_tokens."""

    compaction: Any = None
    context_management: Any = None


class MessagesRequest(_AnthropicRequest):
    """POST /v1/messages."""

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[ValidText], AtMost(MAX_STOPS)] | None = None
    compaction: Refused = None
    container: Refused = None
    context_management: Annotated[Any, NeutralOnly({}, {"edits": []})] = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling(self, defaults: dict[str, float]) -> SamplingParams:
        if self._formats and self._continues_answer:
            name = next(iter(self._formats))
            raise InvalidRequest(
                f"{name}: an answer in a format cannot continue a last turn of the assistant",
                param=name,
            )
        sampling = super().sampling(defaults)
        return replace(sampling, stop=(*sampling.stop, *(self.stop_sequences or ())))

    @property
    def _formats(self) -> dict[str, OutputFormat]:
        """The formats that are given, by their fields."""
        formats = {
            "output_config": self.output_config.format if self.output_config else None,
            "output_format": self.output_format,
        }
        return {name: format for name, format in formats.items() if format is not None}

    def grammar_of_field(self) -> dict[str, Grammar]:
        given = {name: format.grammar() for name, format in self._formats.items()}
        return {**given, **super().grammar_of_field()}

    def field_of(self, param: str | None) -> str | None:
        return "stop_sequences" if param == "stop" else super().field_of(param)
