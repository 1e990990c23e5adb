"""Builders: from the replies to one request to a whole answer, or to the events of a stream.

A builder reads the replies of a `Generation`, parses their text, and keeps what came so far. Each
endpoint has a subclass that gives the answer its shape. Next to read: `openai/chat.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import msgspec
from pydantic import BaseModel

from minisgl.errors import EngineFailed, RequestError
from minisgl.message import TextLogprobs, UserReply
from minisgl.server.answers.errors import ErrorResponse, error_body
from minisgl.server.answers.objects import ChoiceFinishReason, Usage, new_id, now, reply_logprobs
from minisgl.server.generation import (
    MAX_LOGPROBS,
    Generation,
    count_logprobs,
    too_many_logprobs,
)
from minisgl.server.parsing.deltas import Delta, OutputParser, ParsedOutput, PlainTextParser
from minisgl.server.parsing.tool_calls import is_object
from minisgl.server.requests.generation_request import GenerationRequest

_encode = msgspec.json.Encoder().encode
# Ends of lines in Unicode, which JSON does not escape by itself.
_ENDS_OF_LINES = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


class ParsedReply(msgspec.Struct, frozen=True):
    """A reply, the index of its answer, and the deltas that were parsed from its text."""

    index: int
    deltas: list[Delta]
    reply: UserReply


class AnswerBuilder(ABC):
    """Builds the answers to one request, reply by reply.

    The index of an answer is the index of its prompt times `num_answers`, plus its number among the
    answers to this prompt.
    """

    id_prefix: str

    def __init__(
        self,
        model: str,
        request: GenerationRequest,
        make_parser: Callable[[], OutputParser] = PlainTextParser,
        num_prompts: int = 1,
    ) -> None:
        self.id = new_id(self.id_prefix)
        self.created = now()
        self.model = model
        self._request = request
        self._num_answers = request.num_answers
        self._is_stream = bool(request.stream)
        self._has_continuous_usage = request.continuous_usage
        self._has_logprobs = request.num_logprobs is not None
        indexes = range(num_prompts * self._num_answers)
        self._parsers = [make_parser() for _ in indexes]
        # A stream sends its text, and does not need it afterwards.
        self._outputs = [ParsedOutput(keeps_text=not self._is_stream) for _ in indexes]
        self._logprobs: list[list[TextLogprobs]] = [[] for _ in indexes]
        self._num_kept_logprobs = 0
        self._last_replies: dict[int, UserReply] = {}
        self._first_replies: dict[int, UserReply] = {}  # of each prompt, for a stream

    async def read_to_end(self, generation: Generation) -> None:
        while not generation.has_ended:
            self._parse(*await generation.next())

    def _parse(self, index: int, reply: UserReply) -> ParsedReply:
        deltas = self._parsers[index].feed(reply.text, is_last=reply.is_final)
        for delta in deltas:
            self._outputs[index].add(delta)
        if not self._is_stream:  # a stream sends them, and does not need them afterwards
            self._keep_logprobs(index, reply_logprobs(reply))
        self._last_replies[index] = reply
        return ParsedReply(index, deltas, reply)

    def _keep_logprobs(self, index: int, tokens: list[TextLogprobs]) -> None:
        self._num_kept_logprobs += count_logprobs(tokens)
        if self._num_kept_logprobs > MAX_LOGPROBS:
            raise too_many_logprobs("its whole answer")
        self._logprobs[index] += tokens

    # A stream, as server-sent events: its start, the replies as they come, its end or an error.

    def begin_stream(self, generation: Generation) -> bytes:
        self._first_replies = generation.unread_replies()
        return b"".join(self.first_events())

    def read_events(self, generation: Generation) -> bytes:
        """Take all waiting replies and return their events."""
        events: list[bytes] = []
        while generation.has_unread:
            events += self.reply_events(self._parse(*generation.take()))
        return b"".join(events)

    def end_stream(self) -> bytes:
        return b"".join(self.last_events())

    def fail_stream(self, error: RequestError | EngineFailed) -> bytes:
        if isinstance(error, RequestError):
            error.name_field(self._request.field_of)
        return b"".join(self.error_events(error))

    @property
    def num_logprobs(self) -> int:
        """Tokens of a whole answer that have log probabilities."""
        return sum(map(len, self._logprobs))

    def finish_reason(self, index: int) -> ChoiceFinishReason:
        reason = self._last_replies[index].finish
        assert reason is not None
        return reason

    def finish_reasons(self) -> list[ChoiceFinishReason]:
        """The finish reasons of the answers that have ended."""
        indexes = sorted(self._last_replies)
        return [self.finish_reason(i) for i in indexes if self._last_replies[i].finish]

    def asks_for_tools(self, index: int) -> bool:
        """Whether an answer has ended so that a client runs its calls: none of them was cut off."""
        calls = self._outputs[index].calls
        has_stopped = self._last_replies[index].finish == "stop"
        return has_stopped and bool(calls) and is_object(calls[-1].arguments)

    def usage(self) -> Usage:
        replies = self._last_replies.items()
        # Answers to one prompt share it, so it is counted with the first of them only.
        firsts = [reply for index, reply in replies if index % self._num_answers == 0]
        num_prompt = sum(reply.num_prompt for reply in firsts)
        num_cached = sum(reply.num_cached for reply in firsts)
        num_output = sum(reply.num_output for _, reply in replies)
        return Usage.model_validate(_usage(num_prompt, num_cached, num_output))

    def first_events(self) -> Iterable[bytes]:
        """The events before any reply; in some APIs there are none."""
        return []

    @abstractmethod
    def reply_events(self, parsed: ParsedReply) -> Iterable[bytes]:
        """The events of one reply."""

    @abstractmethod
    def last_events(self) -> Iterable[bytes]:
        """The events after the last reply."""

    def error_events(self, error: RequestError | EngineFailed) -> Iterable[bytes]:
        """The events that end a stream with an error."""
        return [data_event(ErrorResponse(error=error_body(error)).model_dump())]

    @abstractmethod
    def build(self) -> BaseModel | dict[str, Any]:
        """The whole answer, after `read_to_end`."""


class ChoicesBuilder(AnswerBuilder):
    """Builds several choices together. Each event is a chunk, with one choice or with usage.

    The fields that are equal in all chunks of a stream are encoded once.
    """

    chunk_object: str

    def first_events(self) -> Iterable[bytes]:
        for index in range(len(self._outputs)):
            first = self._first_replies.get(index // self._num_answers)
            usage = self._usage_so_far(first, num_output=0)
            for choice in self.first_choices(index):
                yield self._chunk_event(choice, usage)

    def reply_events(self, parsed: ParsedReply) -> Iterable[bytes]:
        usage = self._usage_so_far(parsed.reply, parsed.reply.num_output)
        return [self._chunk_event(choice, usage) for choice in self.reply_choices(parsed)]

    def _usage_so_far(self, reply: UserReply | None, num_output: int) -> dict[str, Any] | None:
        """The usage of one answer and its prompt, if every chunk has it."""
        if reply is None or not self._has_continuous_usage:
            return None
        return _usage(reply.num_prompt, reply.num_cached, num_output)

    def last_events(self) -> Iterable[bytes]:
        if self._request.include_usage:
            yield self._chunk_event(None, self.usage().model_dump())
        yield b"data: [DONE]\n\n"

    def _chunk_event(
        self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None
    ) -> bytes:
        choice_json = b"" if choice is None else encode_json(choice)
        if usage is None:
            return self._chunk_begin + choice_json + self._chunk_end
        return b'%b%b],"usage":%b}\n\n' % (self._chunk_begin, choice_json, encode_json(usage))

    @cached_property
    def _chunk_begin(self) -> bytes:
        """A chunk up to its choice."""
        fields = {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model,
        }
        return b'data: %b,"choices":[' % encode_json(fields).removesuffix(b"}")

    @cached_property
    def _chunk_end(self) -> bytes:
        """The end of a chunk without usage, after its choice."""
        if self._request.include_usage or self._has_continuous_usage:
            return b'],"usage":null}\n\n'
        return b"]}\n\n"

    @abstractmethod
    def first_choices(self, index: int) -> list[dict[str, Any]]:
        """The choices of the chunks before the text of an answer."""

    @abstractmethod
    def reply_choices(self, parsed: ParsedReply) -> list[dict[str, Any]]:
        """The choices of the chunks with the text or finish reason of a reply; may be empty."""


def encode_json(data: Any) -> bytes:
    """JSON that is one line, also for readers that know more ends of lines than events have.

    httpx is one of them: it splits lines as Python's `str.splitlines` does.
    """
    encoded = _encode(data)
    if encoded.isascii():
        return encoded
    for end, escaped in _ENDS_OF_LINES.items():
        encoded = encoded.replace(end, escaped)
    return encoded


def data_event(data: dict[str, Any]) -> bytes:
    """A server-sent event without an `event:` line."""
    return b"data: %b\n\n" % encode_json(data)


def typed_event(data: dict[str, Any]) -> bytes:
    """An event whose `event:` line is the type in its data."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode_json(data))


def _usage(num_prompt: int, num_cached: int, num_output: int) -> dict[str, Any]:
    """The fields of a `Usage`."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
