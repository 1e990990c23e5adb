"""Answers of /v1/responses: items that grow, the events that tell of it, and the response that has them all.

A whole answer is what a stream ends with; both are made in the same way. All objects are plain dicts here, which the
tests hold against OpenAI's types.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypeAlias

from minisgl.core import SamplingParams
from minisgl.errors import EngineFailed, RequestError
from minisgl.message import Prompt, TextLogprobs, UserReply
from minisgl.server.frontend import Generation
from minisgl.server.openai.builder import Answer, error_response
from minisgl.server.openai.common import Likely, now
from minisgl.server.openai.responses_request import ResponsesRequest
from minisgl.server.parsing import Dialect
from minisgl.server.parsing.deltas import CallArguments, CallBegin, Content, Delta, Reasoning

Object: TypeAlias = dict[str, Any]
End: TypeAlias = Literal["completed", "incomplete"]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_FIXED = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
_ECHOED: dict[str, Any] = {  # what a response says of its request, and what stands for null there
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


class Output:
    """The items of an answer. At most the last one still grows: what an answer says, it says in order.

    Every change is also told as events.
    """

    def __init__(self, suffix: str) -> None:
        self.items: list[Object] = []
        self._suffix = suffix  # of the items' ids
        self._logprobs: list[Object] = []  # of tokens whose text has not come yet

    def note(self, token: TextLogprobs) -> None:
        """Keep a token's log probabilities for the text that comes next. Only messages have them."""
        top = [_likely(text, logprob) for text, logprob in token.top]
        self._logprobs.append({**_likely(token.text, token.logprob), "top_logprobs": top})

    def take(self, delta: Delta) -> list[Object]:
        match delta:
            case Content(text):
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                return self._write(text, "message", part, role="assistant")
            case Reasoning(text):
                return self._write(
                    text, "reasoning", {"type": "reasoning_text", "text": ""}, summary=[]
                )
            case CallBegin(_, id, name):
                return self._add("function_call", call_id=id, name=name, arguments="")
            case CallArguments(_, text):
                self._logprobs = []
                self.items[-1]["arguments"] += text
                return [self._event("function_call_arguments.delta", delta=text)]

    def _write(self, text: str, kind: str, empty_part: Object, **fields: Any) -> list[Object]:
        opened = [] if self.is_growing(kind) else self._add(kind, **fields, content=[])
        content = self.items[-1]["content"]
        if opened:
            opened.append(self._event("content_part.added", content_index=0, part=empty_part))
            content.append(deepcopy(empty_part))
        news: Object = {"delta": text}
        content[0]["text"] += text
        if "logprobs" in empty_part:
            news["logprobs"] = self._logprobs
            content[0]["logprobs"] += self._logprobs
        self._logprobs = []
        return [*opened, self._event(f"{empty_part['type']}.delta", content_index=0, **news)]

    def finish(self, end: End) -> list[Object]:
        """Nothing more will come. There is a message or a call, even if there was nothing to say."""
        has_answer = any(item["type"] != "reasoning" for item in self.items)
        late = self._logprobs and self.is_growing("message")
        return [*(self.take(Content("")) if late or not has_answer else []), *self.close(end)]

    def close(self, end: End) -> list[Object]:
        """End the item that grows, if there is one."""
        if not self.is_growing(*_PREFIXES):
            return []
        item = self.items[-1]
        item["status"] = end
        return [*self._complete(item), self._item_event("done")]

    def is_growing(self, *kinds: str) -> bool:
        return (
            bool(self.items)
            and self.items[-1]["status"] == "in_progress"
            and self.items[-1]["type"] in kinds
        )

    def _complete(self, item: Object) -> list[Object]:
        if item["type"] == "function_call":
            return [
                self._event(
                    "function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            ]
        part = item["content"][0]
        texts = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = self._event(f"{part['type']}.done", content_index=0, **texts)
        return [done, self._event("content_part.done", content_index=0, part=part)]

    def _add(self, kind: str, **fields: Any) -> list[Object]:
        closed = self.close("completed")
        item_id = f"{_PREFIXES[kind]}_{self._suffix}{len(self.items)}"
        self.items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        return [*closed, deepcopy(self._item_event("added"))]

    def _item_event(self, what: str) -> Object:
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.items) - 1,
            "item": self.items[-1],
        }

    def _event(self, kind: str, **fields: Any) -> Object:
        """Of the last item."""
        place = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        return {"type": f"response.{kind}", **place, **fields}


def _likely(text: str, logprob: float | None) -> Object:
    """As in chat, but for `bytes`, which the types want: empty where a token is part of a character."""
    return {"token": text, "logprob": logprob, "bytes": Likely.of(text, logprob).bytes or []}


class ResponsesAnswer(Answer):
    id_prefix = "resp_"

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        prompts: list[Prompt],
        sampling: SamplingParams,
        dialect: Dialect,
    ) -> None:
        eager = bool(request.stream)
        make_reader = partial(
            dialect.make_reader, request.tool_use, thinks=request.thinks, eager=eager
        )
        super().__init__(model, request, prompts, make_reader)
        self._asked = _asked(request, sampling)
        self._output = Output(self.id.removeprefix(self.id_prefix))
        self._num_output = self._num_reasoning = 0
        self._numbers = itertools.count()

    async def finish(self, generation: Generation) -> None:
        for early in self._early:
            self._grow(*early)
        while not generation.has_ended:
            self._grow(*await self._read(generation))

    def _grow(self, _index: int, deltas: list[Delta], reply: UserReply) -> list[Object]:
        for token in reply.logprobs:
            self._output.note(token)
        events = [event for delta in deltas for event in self._output.take(delta)]
        if self._output.is_growing("reasoning"):
            self._num_reasoning += reply.num_output - self._num_output
        self._num_output = reply.num_output
        return events + (self._output.finish(_end_of(reply)) if reply.finish else [])

    def head(self) -> Iterable[str]:
        response = self._response("in_progress")
        return [
            self._event({"type": f"response.{kind}", "response": response})
            for kind in ("created", "in_progress")
        ]

    def news(self, index: int, deltas: list[Delta], reply: UserReply) -> Iterable[str]:
        return map(self._event, self._grow(index, deltas, reply))

    def tail(self) -> Iterable[str]:
        return [self._end_event(self.whole())]

    def failure(self, error: RequestError | EngineFailed) -> Iterable[str]:
        body = error_response(error).error.model_dump(include={"code", "message", "param"})
        yield self._event({"type": "error", **body})
        self._output.close("incomplete")
        code = "server_error" if isinstance(error, EngineFailed) else "invalid_prompt"
        yield self._end_event(self._response("failed", error={"code": code, "message": str(error)}))

    def _end_event(self, response: Object) -> str:
        return self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, event: Object) -> str:
        data = json.dumps({**event, "sequence_number": next(self._numbers)}, ensure_ascii=False)
        return f"event: {event['type']}\ndata: {data}\n\n"

    def whole(self) -> Object:
        reply = self._last[0]
        if _end_of(reply) == "completed":
            return self._response("completed", completed_at=now(), usage=self._spent())
        details = {"reason": "max_output_tokens"} if reply.finish == "length" else None
        return self._response("incomplete", incomplete_details=details, usage=self._spent())

    def _response(self, status: str, **more: Any) -> Object:
        head = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
        }
        unless_told = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        return {**head, "output": self._output.items, **self._asked, **unless_told, **more}

    def _spent(self) -> Object:
        usage = self.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": usage.total_tokens,
        }


def _end_of(reply: UserReply) -> End:
    return "completed" if reply.finish == "stop" else "incomplete"


def _asked(request: ResponsesRequest, sampling: SamplingParams) -> Object:
    given = request.model_dump(by_alias=True, include=set(_ECHOED))
    return {
        **_FIXED,
        **{name: _ECHOED[name] if value is None else value for name, value in given.items()},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
