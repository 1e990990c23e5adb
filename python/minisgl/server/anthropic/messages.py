"""POST /v1/messages: the message that answers it, and the builder that makes it or its events.

A message consists of blocks, of which only the last one grows. All objects are plain dicts, which
the tests compare with Anthropic's types; `MessageObject` describes them in the OpenAPI document.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from minisgl.errors import EngineFailed, RequestError
from minisgl.server.answers.builder import AnswerBuilder, ParsedReply, typed_event
from minisgl.server.answers.errors import error_body
from minisgl.server.answers.objects import ResponseModel
from minisgl.server.anthropic.errors import error_object
from minisgl.server.anthropic.messages_request import MessagesRequest
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.deltas import (
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedText,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from minisgl.server.parsing.tool_calls import is_object

PING_INTERVAL_S = 10.0

Object: TypeAlias = dict[str, Any]


class MessageUsage(ResponseModel):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageObject(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    input_tokens: int


class MessagesBuilder(AnswerBuilder):
    """Builds one message. A stream sends its blocks while they grow.

    While it holds back a tool call, or reasoning that the client did not ask for, it sends pings:
    proxies close an idle connection.
    """

    id_prefix = "msg_"

    def __init__(self, model: str, request: MessagesRequest, dialect: Dialect) -> None:
        # Anthropic's client raises an error at arguments that are no JSON, also in a stream.
        super().__init__(model, request, dialect.parser_maker(request, eager=False))
        self._shows_thoughts = request.shows_thoughts
        self._num_blocks = 0  # that a stream has begun
        self._open_block: str | None = None  # the type of the one that grows
        self._has_begun = False
        self._last_event_at = 0.0  # by `time.monotonic`

    # A stream.

    def reply_events(self, parsed: ParsedReply) -> Iterable[bytes]:
        events = [*self._events(parsed)]
        now = time.monotonic()
        if not events and now - self._last_event_at >= PING_INTERVAL_S:
            events = [_PING]
        if events:
            self._last_event_at = now
        return events

    def _events(self, parsed: ParsedReply) -> Iterator[bytes]:
        if not self._has_begun:  # only now is the prompt's length known
            self._has_begun = True
            yield _event("message_start", message=self._message([], _end_by(None)))
        for delta in parsed.deltas:
            yield from self._delta_events(delta)

    def _delta_events(self, delta: Delta) -> Iterable[bytes]:
        match delta:
            case ContentDelta(text):
                yield from self._continue_block(_text_block(""))
                yield self._block_delta(type="text_delta", text=text)
            case ReasoningDelta(text):
                yield from self._continue_block(_thinking_block(""))
                if self._shows_thoughts:
                    yield self._block_delta(type="thinking_delta", thinking=text)
            case ToolCallStart(_, id, name):
                yield from self._end_block()
                yield from self._continue_block(_call_block(ParsedCall(id, name)))
            case ToolCallArguments(_, text):
                yield self._block_delta(type="input_json_delta", partial_json=text)

    def _continue_block(self, empty: Object) -> Iterable[bytes]:
        """Begin a block, unless the one that grows is of its type."""
        if self._open_block == empty["type"]:
            return
        yield from self._end_block()
        self._open_block = empty["type"]
        self._num_blocks += 1
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=empty)

    def _block_delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end_block(self) -> Iterable[bytes]:
        if self._open_block is not None:
            self._open_block = None
            yield _event("content_block_stop", index=self._num_blocks - 1)

    def last_events(self) -> Iterable[bytes]:
        if not self._num_blocks:
            yield from self._continue_block(_text_block(""))
        yield from self._end_block()
        yield _event("message_delta", delta=self._end(), usage=self._usage_object())
        yield _event("message_stop")

    def error_events(self, error: RequestError | EngineFailed) -> Iterable[bytes]:
        return [typed_event(error_object(error_body(error), error.status))]

    # A whole answer.

    def build(self) -> Object:
        blocks = [self._block(part) for part in self._outputs[0].parts]
        return self._message(blocks or [_text_block("")], self._end())

    def _block(self, part: ParsedText | ParsedCall) -> Object:
        match part:
            case ParsedCall():
                return _call_block(part)
            case ParsedText(text=text, is_reasoning=True):
                return _thinking_block(text if self._shows_thoughts else "")
            case ParsedText(text=text):
                return _text_block(text)

    def _message(self, blocks: list[Object], end: Object) -> Object:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            **end,
            "usage": self._usage_object(),
        }

    def _end(self) -> Object:
        """Why the message ended. Calls that are to be run count more than a stop sequence."""
        if self.finish_reason(0) == "length":
            return _end_by("max_tokens")
        if self.asks_for_tools(0):
            return _end_by("tool_use")
        stop_text = self._last_replies[0].stop_text
        return _end_by("end_turn" if stop_text is None else "stop_sequence", stop_text)

    def _usage_object(self) -> Object:
        """Input tokens are those that did not come from the prefix cache."""
        usage = self.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }


def _end_by(stop_reason: str | None, stop_sequence: str | None = None) -> Object:
    return {"stop_reason": stop_reason, "stop_sequence": stop_sequence}


def _event(event_type: str, **fields: Any) -> bytes:
    return typed_event({"type": event_type, **fields})


_PING = _event("ping")


def _text_block(text: str) -> Object:
    return {"type": "text", "text": text}


def _thinking_block(text: str) -> Object:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call_block(call: ParsedCall) -> Object:
    """A call; one that was cut off before its arguments were whole has none.

    The arguments stay as the model wrote them: a float cannot hold each of its numbers.
    """
    arguments = call.arguments if is_object(call.arguments) else "{}"
    raw = msgspec.Raw(arguments.encode())
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": raw}
