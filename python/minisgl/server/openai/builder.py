"""Answers as they grow, and two of their shapes: chat and text completions, whole and in chunks.

Next to read: `responses.py`, which has the third.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from minisgl.errors import EngineFailed, RequestError
from minisgl.message import Prompt, TextLogprobs, UserReply
from minisgl.server.frontend import Generation
from minisgl.server.openai.common import (
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
    FunctionCall,
    Likely,
    PromptTokensDetails,
    ToolCall,
    Usage,
    new_id,
    now,
)
from minisgl.server.openai.generation_request import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.deltas import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    PlainReader,
    Reader,
    Reasoning,
    Transcript,
)
from minisgl.server.parsing.tool_calls import is_object


class Answer(ABC):
    """The answers to one request, fed reply by reply. A subclass gives them OpenAI's shape."""

    id_prefix: str

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
        self._field_of = request.field_of
        self._n = request.num_answers
        self._usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
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

    async def events(self, generation: Generation) -> AsyncIterator[str]:
        """The answer as server-sent events, after `begin`. An engine that dies meanwhile is the end of it."""
        try:
            for event in self.head():
                yield event
            for early in self._early:
                for event in self.news(*early):
                    yield event
            while not generation.has_ended:
                for event in self.news(*await self._read(generation)):
                    yield event
        except (EngineFailed, RequestError) as error:
            if isinstance(error, RequestError):
                error.param = self._field_of(error.param)
            for event in self.failure(error):
                yield event
            return
        for event in self.tail():
            yield event

    def finish_reason(self, index: int) -> FinishReason:
        reason = self._last[index].finish
        assert reason is not None
        return reason

    def usage(self) -> Usage:
        firsts = [
            reply for index, reply in self._last.items() if index % self._n == 0
        ]  # a prompt counts once
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
    def head(self) -> Iterable[str]:
        """The events before any text."""

    @abstractmethod
    def news(self, index: int, deltas: list[Delta], reply: UserReply) -> Iterable[str]:
        """The events of a reply and what was read in it."""

    @abstractmethod
    def tail(self) -> Iterable[str]:
        """The events after the last reply."""

    def failure(self, error: RequestError | EngineFailed) -> Iterable[str]:
        """The events instead of the rest."""
        return [f"data: {error_response(error).model_dump_json()}\n\n"]

    @abstractmethod
    def whole(self) -> BaseModel | dict[str, Any]:
        """The finished answer as one object."""


class _ChoicesAnswer(Answer):
    """Choices side by side, in events that are chunks of them."""

    chunk_object: str

    def head(self) -> Iterable[str]:
        return [
            self._event(choice)
            for index in range(len(self._said))
            for choice in self.opening(index)
        ]

    def news(self, index: int, deltas: list[Delta], reply: UserReply) -> Iterable[str]:
        return [self._event(choice) for choice in self.pieces(index, deltas, reply)]

    def tail(self) -> Iterable[str]:
        if self._usage:
            self._usage = {"usage": self.usage().model_dump()}
            yield self._event()
        yield "data: [DONE]\n\n"

    def _event(self, *choices: dict[str, Any]) -> str:
        head = {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model,
        }
        return f"data: {json.dumps({**head, 'choices': choices, **self._usage}, ensure_ascii=False)}\n\n"

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a stream says of a choice before its text."""

    @abstractmethod
    def pieces(self, index: int, deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:
        """What a stream says of a reply and what was read in it: text, an end, both or nothing."""


class ChatAnswer(_ChoicesAnswer):
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, model: str, request: ChatRequest, prompts: list[Prompt], dialect: Dialect
    ) -> None:
        self._tools = request.tool_use
        make_reader = partial(
            dialect.make_reader, self._tools, thinks=request.thinks, eager=bool(request.stream)
        )
        super().__init__(model, request, prompts, make_reader)

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [
            _delta(
                index, {"role": "assistant", "content": None if self._tools.offered else ""}, None
            )
        ]

    def pieces(self, index: int, deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:
        logprobs = self._shape(reply.logprobs).model_dump() if reply.logprobs else None
        said = [_shape_delta(delta) for delta in deltas]
        if logprobs and not said:
            said = [{"content": ""}]
        news = [_delta(index, it, None, None if i else logprobs) for i, it in enumerate(said)]
        return news + ([_delta(index, {}, self.finish_reason(index))] if reply.finish else [])

    def finish_reason(self, index: int) -> FinishReason:
        """An answer that had to call one tool, or stopped in a call, ends as any other; OpenAI has the first so."""
        reason = super().finish_reason(index)
        calls = self._said[index].calls
        is_call = calls and is_object(calls[-1].arguments) and self._tools.named is None
        return "tool_calls" if is_call and reason == "stop" else reason

    def _shape(self, logprobs: list[TextLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    **Likely.of(token.text, token.logprob).model_dump(),
                    top_logprobs=[Likely.of(text, logprob) for text, logprob in token.top],
                )
                for token in logprobs
            ]
        )

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=_message(self._said[index]),
                logprobs=self._shape(self._logprobs[index]) if self._has_logprobs else None,
                finish_reason=self.finish_reason(index),
            )
            for index in range(len(self._said))
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage()
        )


class CompletionAnswer(_ChoicesAnswer):
    id_prefix = "cmpl-"
    chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        request: CompletionRequest,
        prompts: list[Prompt],
        echoes: list[str] | None = None,
    ) -> None:
        super().__init__(model, request, prompts)
        self._echoes = echoes or [""] * len(prompts)
        tells_prompt = request.prompt_logprobs is not None
        self._offsets = [
            0 if tells_prompt else len(self._echo(index)) for index in range(len(self._said))
        ]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n]

    def opening(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index)
        return (
            [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}]
            if echo
            else []
        )

    def pieces(self, index: int, _deltas: list[Delta], reply: UserReply) -> list[dict[str, Any]]:
        tokens = told(reply)
        if not (reply.text or reply.finish or tokens):
            return []
        logprobs = self._shape(index, tokens).model_dump() if tokens else None
        return [
            {
                "index": index,
                "text": reply.text,
                "logprobs": logprobs,
                "finish_reason": reply.finish,
            }
        ]

    def _shape(self, index: int, logprobs: list[TextLogprobs]) -> CompletionLogprobs:
        """Of the next tokens of a choice."""
        begin = self._offsets[index]
        ends = list(accumulate((len(token.text) for token in logprobs), initial=begin))
        self._offsets[index] = ends[-1]
        return CompletionLogprobs(
            tokens=[token.text for token in logprobs],
            token_logprobs=[token.logprob for token in logprobs],
            top_logprobs=[None if token.logprob is None else dict(token.top) for token in logprobs],
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
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage()
        )


def told(reply: UserReply) -> list[TextLogprobs]:
    """The log probabilities that come with a reply: the prompt's, if they were asked for, and the new tokens'."""
    return [*(reply.prompt_logprobs or ()), *reply.logprobs]


def _message(said: Transcript) -> AssistantMessage:
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in said.calls
    ]
    content = None if calls and not said.content else said.content
    return AssistantMessage(
        content=content, reasoning_content=said.reasoning or None, tool_calls=calls or None
    )


def _shape_delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, id, name):
            function = {"name": name, "arguments": ""}
            return {
                "tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]
            }
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _delta(
    index: int, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def error_response(error: RequestError | EngineFailed) -> ErrorResponse:
    """OpenAI's error object for an error of ours."""
    if isinstance(error, EngineFailed):
        return ErrorResponse(
            error=ErrorBody(message=str(error), type="server_error", code="engine_failed")
        )
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    return ErrorResponse(
        error=ErrorBody(message=str(error), type=kind, param=error.param, code=error.code)
    )
