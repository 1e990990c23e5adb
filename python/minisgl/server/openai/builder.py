"""Builders: from the replies to one request to a whole answer, or to the events of a stream.

A builder reads the replies of a `Generation`, parses their text, and keeps what came so far. Each
endpoint has a subclass that gives this its shape. Next to read: `chat.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from minisgl.errors import EngineFailed, RequestError
from minisgl.message import Prompt, TextLogprobs, UserReply
from minisgl.server.frontend import Generation
from minisgl.server.openai.common import (
    FinishReason,
    PromptTokensDetails,
    Usage,
    error_response,
    new_id,
    now,
    reply_logprobs,
)
from minisgl.server.openai.generation_request import GenerationRequest
from minisgl.server.parsing.deltas import Delta, OutputParser, ParsedOutput, PlainTextParser


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply, the index of its answer, and what was parsed from its text."""

    index: int
    deltas: list[Delta]
    reply: UserReply


class AnswerBuilder(ABC):
    """Builds the answers to one request, reply by reply.

    Answers are numbered prompt by prompt, each prompt with all its answers.
    """

    id_prefix: str

    def __init__(
        self,
        model: str,
        request: GenerationRequest,
        prompts: list[Prompt],
        make_parser: Callable[[], OutputParser] = PlainTextParser,
    ) -> None:
        self.id = new_id(self.id_prefix)
        self.created = now()
        self.model = model
        self._request = request
        self._num_answers = request.num_answers
        self._has_logprobs = request.num_logprobs is not None
        indexes = range(len(prompts) * self._num_answers)
        self._parsers = [make_parser() for _ in indexes]
        self._outputs = [ParsedOutput() for _ in indexes]
        self._logprobs: list[list[TextLogprobs]] = [[] for _ in indexes]
        self._last_replies: dict[int, UserReply] = {}
        self._first_replies: dict[int, UserReply] = {}  # of each prompt, for a stream

    async def read_to_end(self, generation: Generation) -> None:
        while not generation.has_ended:
            await self._read_reply(generation)

    async def _read_reply(self, generation: Generation) -> ParsedReply:
        index, reply = await generation.next()
        deltas = self._parsers[index].feed(reply.text, is_last=reply.is_final)
        for delta in deltas:
            self._outputs[index].add(delta)
        if not self._request.stream:  # a stream sends them and needs them no more
            self._logprobs[index] += reply_logprobs(reply)
        self._last_replies[index] = reply
        return ParsedReply(index, deltas, reply)

    async def stream_events(self, generation: Generation) -> AsyncIterator[str]:
        """The answers as server-sent events.

        An error of the engine ends the stream with `error_events`.
        """
        self._first_replies = generation.unread_replies()
        try:
            for event in self.first_events():
                yield event
            while not generation.has_ended:
                parsed = await self._read_reply(generation)
                for event in self.reply_events(parsed):
                    yield event
        except (EngineFailed, RequestError) as error:
            if isinstance(error, RequestError):
                error.param = self._request.field_of(error.param)
            for event in self.error_events(error):
                yield event
            return
        for event in self.last_events():
            yield event

    @property
    def num_logprobs(self) -> int:
        """Tokens of a whole answer that have log probabilities."""
        return sum(map(len, self._logprobs))

    def finish_reason(self, index: int) -> FinishReason:
        reason = self._last_replies[index].finish
        assert reason is not None
        return reason

    def usage(self) -> Usage:
        replies = self._last_replies.items()
        # Answers to one prompt share it, so it is counted with the first of them only.
        firsts = [reply for index, reply in replies if index % self._num_answers == 0]
        num_prompt = sum(reply.num_prompt for reply in firsts)
        num_cached = sum(reply.num_cached for reply in firsts)
        num_output = sum(reply.num_output for _, reply in replies)
        return _usage(num_prompt, num_cached, num_output)

    @abstractmethod
    def first_events(self) -> Iterable[str]:
        """The events before any reply."""

    @abstractmethod
    def reply_events(self, parsed: ParsedReply) -> Iterable[str]:
        """The events of one reply."""

    @abstractmethod
    def last_events(self) -> Iterable[str]:
        """The events after the last reply."""

    def error_events(self, error: RequestError | EngineFailed) -> Iterable[str]:
        """The events that end a stream with an error."""
        return [f"data: {error_response(error).model_dump_json()}\n\n"]

    @abstractmethod
    def build(self) -> BaseModel | dict[str, Any]:
        """The whole answer, after `read_to_end`."""


class ChoicesBuilder(AnswerBuilder):
    """Builds choices side by side. Each event is a chunk, with one choice or with usage."""

    chunk_object: str

    def first_events(self) -> Iterable[str]:
        for index in range(len(self._outputs)):
            first = self._first_replies.get(index // self._num_answers)
            usage = self._usage_so_far(first, num_output=0)
            for choice in self.first_choices(index):
                yield self._chunk_event([choice], usage)

    def reply_events(self, parsed: ParsedReply) -> Iterable[str]:
        usage = self._usage_so_far(parsed.reply, parsed.reply.num_output)
        return [self._chunk_event([choice], usage) for choice in self.reply_choices(parsed)]

    def _usage_so_far(self, reply: UserReply | None, num_output: int) -> Usage | None:
        """The usage of one answer and its prompt, if every chunk has it."""
        if reply is None or not self._request.continuous_usage:
            return None
        return _usage(reply.num_prompt, reply.num_cached, num_output)

    def last_events(self) -> Iterable[str]:
        if self._request.include_usage:
            yield self._chunk_event([], self.usage())
        yield "data: [DONE]\n\n"

    def _chunk_event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> str:
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self._request.include_usage or self._request.continuous_usage:
            chunk["usage"] = usage.model_dump() if usage else None
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    @abstractmethod
    def first_choices(self, index: int) -> list[dict[str, Any]]:
        """The choices of chunks that come before the text of an answer."""

    @abstractmethod
    def reply_choices(self, parsed: ParsedReply) -> list[dict[str, Any]]:
        """The choices of chunks with the text or the finish reason of a reply; may be empty."""


def _usage(num_prompt: int, num_cached: int, num_output: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )
