"""POST /v1/responses: the Response object, and the builder that makes it or its stream events.

A whole response is what a stream ends with; both are made in one way, from plain dicts.
`ResponseObject` describes them in the OpenAPI document, and a test compares the two. Reference:
https://platform.openai.com/docs/api-reference/responses. The request is in `responses_request.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Literal

from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed, RequestError
from minisgl.message import UserReply
from minisgl.server.answers.builder import AnswerBuilder, ParsedReply, typed_event
from minisgl.server.answers.errors import error_body
from minisgl.server.answers.objects import OMITTED_IF_NULL, ChatLogprob, ResponseModel, now
from minisgl.server.generation import Generation
from minisgl.server.openai.responses_items import EndStatus, Object, OutputItems
from minisgl.server.openai.responses_request import ReasoningPart, ResponsesRequest, TextOptions
from minisgl.server.openai.responses_tools import ResponsesTool, ToolChoice
from minisgl.server.parsing import Dialect

_FIXED_FIELDS: Object = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
_ECHOED_FIELDS: Object = {  # fields of the request that the response has too, and their defaults
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatLogprob]


class _OutputItem(ResponseModel):
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
    namespace: str | None = OMITTED_IF_NULL
    arguments: str


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseObject(ResponseModel):
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
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    background: Literal[False]
    store: Literal[False]
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponsesBuilder(AnswerBuilder):
    """Builds the response to one prompt: its output items grow with every reply."""

    id_prefix = "resp_"

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        sampling: SamplingParams,
        dialect: Dialect,
    ) -> None:
        parser_maker = dialect.parser_maker(request, eager=bool(request.stream))
        super().__init__(model, request, parser_maker)
        self._request_fields = _request_fields(request, sampling)
        self._output = OutputItems(self.id.removeprefix(self.id_prefix), request.namespaced_names)
        self._num_characters = 0
        self._num_tokens = 0  # of these characters
        self._num_reasoning_tokens = 0
        self._sequence_numbers = itertools.count()

    async def read_to_end(self, generation: Generation) -> None:
        while not generation.has_ended:
            self._add_to_output(self._parse(*await generation.next()))

    def _add_to_output(self, parsed: ParsedReply) -> list[Object]:
        """Let the items grow; returns the events about it."""
        reply = parsed.reply
        self._output.add_logprobs(reply.logprobs)
        self._count_reasoning(reply)
        events = [event for delta in parsed.deltas for event in self._output.add_delta(delta)]
        if reply.finish:
            events += self._output.finish(_end_status(reply), self._num_characters)
        return events

    def _count_reasoning(self, reply: UserReply) -> None:
        """Add the tokens of a reply's text that are reasoning.

        Tokens whose text comes later, as parts of a character, count with that text.
        """
        if not reply.text:
            return
        num_reasoning = self._parsers[0].num_reasoning - self._num_characters
        share = min(1.0, num_reasoning / len(reply.text))
        if share > 0:
            num_new = reply.num_output - self._num_tokens
            self._num_reasoning_tokens = self._num_tokens + round(num_new * share)
        self._num_characters += len(reply.text)
        self._num_tokens = reply.num_output

    def first_events(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        for event_type in ("response.created", "response.in_progress"):
            yield self._event({"type": event_type, "response": response})

    def reply_events(self, parsed: ParsedReply) -> Iterable[bytes]:
        return [self._event(event) for event in self._add_to_output(parsed)]

    def last_events(self) -> Iterable[bytes]:
        return [self._end_event(self.build())]

    def error_events(self, error: RequestError | EngineFailed) -> Iterable[bytes]:
        body = error_body(error).model_dump(include={"code", "message", "param"})
        yield self._event({"type": "error", **body})
        self._output.end_item("incomplete")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        yield self._end_event(self._response("failed", error={"code": code, "message": str(error)}))

    def _end_event(self, response: Object) -> bytes:
        return self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, event: Object) -> bytes:
        return typed_event({**event, "sequence_number": next(self._sequence_numbers)})

    def build(self) -> Object:
        reply = self._last_replies[0]
        usage = self._response_usage()
        if _end_status(reply) == "completed":
            return self._response("completed", completed_at=now(), usage=usage)
        details = {"reason": "max_output_tokens"} if reply.finish == "length" else None
        return self._response("incomplete", incomplete_details=details, usage=usage)

    def _response(self, status: str, **fields: Any) -> Object:
        """A response with this status; `fields` replace those that are null here."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": self._output.items,
            **self._request_fields,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **fields,
        }

    def _response_usage(self) -> Object:
        usage = self.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _end_status(reply: UserReply) -> EndStatus:
    return "completed" if reply.finish == "stop" else "incomplete"


def _request_fields(request: ResponsesRequest, sampling: SamplingParams) -> Object:
    """The fields of a response that say how the request was answered."""
    fields: Object = {**_FIXED_FIELDS}
    given = request.model_dump(by_alias=True, include=set(_ECHOED_FIELDS))
    for name, value in given.items():
        fields[name] = _ECHOED_FIELDS[name] if value is None else value
    summary = request.reasoning.summary if request.reasoning else None
    fields["reasoning"] = {"effort": request.effort, "summary": summary}
    fields["temperature"] = sampling.temperature
    fields["top_p"] = sampling.top_p
    return fields
