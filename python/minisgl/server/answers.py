"""Answers as they grow, and two of their shapes: chat and text completions, whole and in chunks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from minisgl.errors import EngineFailed, RequestError
from minisgl.message import Prompt, TextLogprobs, UserReply
from minisgl.server.deltas import Content, Delta, PlainReader, Reader, Transcript
from minisgl.server.frontend import Generation
from minisgl.server.objects import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ErrorBody,
    ErrorResponse,
    FinishReason,
    Likely,
    PromptTokensDetails,
    Usage,
    new_id,
    now,
)
from minisgl.server.protocol import CompletionRequest, GenerationRequest


class Answer(ABC):
    """The choices of one request, fed reply by reply. A subclass gives them OpenAI's shape."""

    id_prefix: str
    chunk_object: str

    def __init__(
        self,
        model: str,
        request: GenerationRequest,
        prompts: list[Prompt],
        make_reader: Callable[[], Reader] = PlainReader,
    ) -> None:
        self.id = new_id(self.id_prefix)
        self.created = now()
        self.model = model
        self._n = request.num_answers
        self._has_logprobs = request.num_logprobs is not None
        self._readers = [make_reader() for _ in range(self._n * len(prompts))]
        self._said = [Transcript() for _ in self._readers]
        self._logprobs: list[list[TextLogprobs]] = [[] for _ in self._readers]
        self._last: dict[int, UserReply] = {}
        self._early: list[tuple[int, list[Delta], UserReply]] = []

    async def begin(self, generation: Generation) -> None:
        """Wait until there is something to say to every prompt; from then on none of its answers will be refused."""
        while len({index // self._n for index in self._last}) < len(self._readers) // self._n:
            self._early.append(await self._read(generation))

    async def finish(self, generation: Generation) -> None:
        """Read all that is left."""
        while not generation.has_ended:
            await self._read(generation)

    async def _read(self, generation: Generation) -> tuple[int, list[Delta], UserReply]:
        index, reply = await generation.next()
        deltas = self._readers[index].feed(reply.text, ends=reply.is_final)
        for delta in deltas:
            self._said[index].add(delta)
        self._logprobs[index] += told(reply)
        self._last[index] = reply
        return index, deltas, reply

    async def events(self, generation: Generation, *, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events, after `begin`. An engine that dies meanwhile is the last event."""
        usage = {"usage": None} if include_usage else {}
        try:
            for index in range(len(self._said)):
                for choice in self.opening(index):
                    yield self._event([choice], **usage)
            for early in self._early:
                for choice in self.pieces(*early):
                    yield self._event([choice], **usage)
            while not generation.has_ended:
                for choice in self.pieces(*await self._read(generation)):
                    yield self._event([choice], **usage)
        except (EngineFailed, RequestError) as error:
            yield f"data: {error_response(error).model_dump_json()}\n\n"
            return
        if include_usage:
            yield self._event([], usage=self.usage().model_dump())
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        head = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}
        return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

    def finish_reason(self, index: int) -> FinishReason:
        reason = self._last[index].finish
        assert reason is not None
        return reason

    def usage(self) -> Usage:
        firsts = [reply for index, reply in self._last.items() if index % self._n == 0]  # a prompt counts once
        num_prompt = sum(reply.num_prompt for reply in firsts)
        num_output = sum(reply.num_output for reply in self._last.values())
        num_cached = sum(reply.num_cached for reply in firsts)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a stream says of a choice before its text."""

    @abstractmethod
    def pieces(self, index: int, deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:
        """What a stream says of a reply and what was read in it: text, an end, both or nothing."""

    @abstractmethod
    def whole(self) -> BaseModel:
        """The finished answer as one object."""


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": ""}, None)]

    def pieces(self, index: int, deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:
        logprobs = self._shape([reply.logprobs]).model_dump() if reply.logprobs else None
        said = [{"content": delta.text} for delta in deltas if isinstance(delta, Content)]
        if logprobs and not said:
            said = [{"content": ""}]
        news = [_delta(index, it, None, None if i else logprobs) for i, it in enumerate(said)]
        return news + ([_delta(index, {}, reply.finish)] if reply.finish else [])

    def _shape(self, logprobs: list[TextLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    **Likely.of(token.text, token.own).model_dump(),
                    top_logprobs=[Likely.of(text, logprob) for text, logprob in token.top],
                )
                for token in logprobs
            ]
        )

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=self._said[index].content),
                logprobs=self._shape(self._logprobs[index]) if self._has_logprobs else None,
                finish_reason=self.finish_reason(index),
            )
            for index in range(len(self._said))
        ]
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage())


class CompletionAnswer(Answer):
    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def __init__(
        self, model: str, request: CompletionRequest, prompts: list[Prompt], echoes: list[str] | None = None
    ) -> None:
        super().__init__(model, request, prompts)
        self._echoes = echoes or [""] * len(prompts)
        tells_prompt = request.prompt_logprobs is not None
        self._offsets = [0 if tells_prompt else len(self._echo(index)) for index in range(len(self._said))]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n]

    def opening(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index)
        return [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def pieces(self, index: int, deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:
        tokens = told(reply)
        if not (deltas or reply.finish or tokens):
            return []
        logprobs = self._shape(index, tokens).model_dump() if tokens else None
        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reply.finish}]

    def _shape(self, index: int, logprobs: list[TextLogprobs]) -> CompletionLogprobs:
        """Of the next tokens of a choice."""
        begin = self._offsets[index]
        ends = list(accumulate((len(token.text) for token in logprobs), initial=begin))
        self._offsets[index] = ends[-1]
        return CompletionLogprobs(
            tokens=[token.text for token in logprobs],
            token_logprobs=[token.own for token in logprobs],
            top_logprobs=[None if token.own is None else dict(token.top) for token in logprobs],
            text_offset=ends[:-1],
        )

    def whole(self) -> Completion:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echo(index) + self._said[index].content,
                logprobs=self._shape(index, self._logprobs[index]) if self._has_logprobs else None,
                finish_reason=self.finish_reason(index),
            )
            for index in range(len(self._said))
        ]
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage())


def told(reply: UserReply) -> list[TextLogprobs]:
    """The log probabilities that come with a reply: the prompt's, if they were asked for, and the new token's."""
    return [*(reply.prompt_logprobs or ()), *([reply.logprobs] if reply.logprobs else [])]


def _delta(
    index: int, delta: dict[str, str], finish: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def error_response(error: RequestError | EngineFailed) -> ErrorResponse:
    """OpenAI's error object for an error of ours."""
    if isinstance(error, EngineFailed):
        return ErrorResponse(error=ErrorBody(message=str(error), type="server_error", code="engine_failed"))
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    return ErrorResponse(error=ErrorBody(message=str(error), type=kind, param=error.param, code=error.code))
