"""OpenAI's Response object, as the OpenAPI document tells of it.

Answers are not made of these models: they grow in `responses_answer.py`. A test holds the one against the other.
"""

from __future__ import annotations

from typing import Literal

from minisgl.server.openai.common import Answered, ChatLogprob
from minisgl.server.openai.responses_request import (
    FunctionTool,
    ReasoningPart,
    TextOptions,
    ToolChoice,
)


class OutputText(Answered):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatLogprob]


class _OutputItem(Answered):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_OutputItem):
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningPart]


class OutputCall(_OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(Answered):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(Answered):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    background: Literal[False]
    store: Literal[False]
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
