"""The items of a response while they grow, and the stream events about them.

All objects are plain dicts, which the tests compare with OpenAI's types. Next to read:
`responses.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, TypeAlias

from minisgl.message import TextLogprobs
from minisgl.server.answers.objects import ChatLogprob
from minisgl.server.parsing.deltas import (
    ContentDelta,
    Delta,
    GrowingText,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

Object: TypeAlias = dict[str, Any]
EndStatus: TypeAlias = Literal["completed", "incomplete"]

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The items of a response. Only the last one grows; it gets its text at its end.

    Every method that changes them returns the events that say so.

    Args:
        namespaced_names: the name and the namespace of a function, by the name that models call.
    """

    def __init__(self, id_suffix: str, namespaced_names: Mapping[str, Object]) -> None:
        self.items: list[Object] = []
        self._namespaced_names = namespaced_names
        self._id_suffix = id_suffix
        self._logprobs: list[TextLogprobs] = []  # of tokens whose text is still held back
        self._text = GrowingText()  # of the item that grows

    def add_logprobs(self, tokens: Sequence[TextLogprobs]) -> None:
        """Keep log probabilities until the text of their tokens comes. Only messages have them."""
        self._logprobs += tokens

    def add_delta(self, delta: Delta) -> list[Object]:
        match delta:
            case ContentDelta(text, start):
                return self._add_content(text, self._take_logprobs(start, text))
            case ReasoningDelta(text, start):
                self._take_logprobs(start, text)
                return self._add_reasoning(text)
            case ToolCallStart(_, id, name):
                names = self._namespaced_names.get(name, {"name": name})
                return self._start_item("function_call", call_id=id, **names, arguments="")
            case ToolCallArguments(_, text, start):
                self._take_logprobs(start, text)
                self._text.append(text)
                return [self._item_event("function_call_arguments.delta", delta=text)]

    def _take_logprobs(self, start: int, text: str) -> list[Object]:
        """Those of the tokens of a text, and drop those of what is no text, as a marker, before it.

        A token may be partly in the text.

        Args:
            start: where the text begins, in characters of the answer's text.
        """
        end = start + len(text)
        begun = [token for token in self._logprobs if token.start < end]
        self._logprobs = [token for token in self._logprobs if token.start >= end]
        return [_logprob_object(token) for token in begun if _end_of(token) > start]

    def _add_content(self, text: str, logprobs: list[Object]) -> list[Object]:
        events: list[Object] = []
        if not self.is_growing("message"):
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._start_item("message", role="assistant", content=[])
            events += self._start_part(part)
        part = self.items[-1]["content"][0]
        part["logprobs"] += logprobs
        self._text.append(text)
        events.append(
            self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        )
        return events

    def _add_reasoning(self, text: str) -> list[Object]:
        events: list[Object] = []
        if not self.is_growing("reasoning"):
            events += self._start_item("reasoning", summary=[], content=[])
            events += self._start_part({"type": "reasoning_text", "text": ""})
        self._text.append(text)
        events.append(self._item_event("reasoning_text.delta", content_index=0, delta=text))
        return events

    def finish(self, status: EndStatus, num_characters: int) -> list[Object]:
        """End the answer. It has a message or a call, even if there was no text.

        A message at its end also has the log probabilities of the tokens that ended it.

        Args:
            num_characters: of the answer's text.
        """
        has_answer = any(item["type"] != "reasoning" for item in self.items)
        ended_by = [token for token in self._logprobs if token.start >= num_characters]
        late = [_logprob_object(token) for token in ended_by]
        events: list[Object] = []
        if (late and self.is_growing("message")) or not has_answer:
            events += self._add_content("", late)
        return events + self.end_item(status)

    def end_item(self, status: EndStatus) -> list[Object]:
        """End the item that grows, if there is one."""
        if not self.is_growing(*_ID_PREFIXES):
            return []
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = str(self._text)
            done = [self._call_done(item)]
        else:
            item["content"][0]["text"] = str(self._text)
            done = self._part_done(item)
        return [*done, self._output_event("done")]

    def is_growing(self, *item_types: str) -> bool:
        """Whether the last item grows and is of one of these types."""
        if not self.items:
            return False
        last = self.items[-1]
        return last["status"] == "in_progress" and last["type"] in item_types

    def _call_done(self, item: Object) -> Object:
        fields = {name: item[name] for name in ("name", "arguments")}
        return self._item_event("function_call_arguments.done", **fields)

    def _part_done(self, item: Object) -> list[Object]:
        part = item["content"][0]
        fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self._item_event(f"{part['type']}.done", content_index=0, **fields),
            self._item_event("content_part.done", content_index=0, part=part),
        ]

    def _start_item(self, item_type: str, **fields: Any) -> list[Object]:
        ended = self.end_item("completed")
        item_id = f"{_ID_PREFIXES[item_type]}_{self._id_suffix}{len(self.items)}"
        item = {"id": item_id, "type": item_type, "status": "in_progress", **fields}
        self.items.append(item)
        self._text = GrowingText()
        return [*ended, deepcopy(self._output_event("added"))]  # a copy, because the item grows

    def _start_part(self, part: Object) -> list[Object]:
        """Begin the only part of the last item."""
        self.items[-1]["content"].append(deepcopy(part))
        return [self._item_event("content_part.added", content_index=0, part=part)]

    def _output_event(self, change: str) -> Object:
        """An event with the whole last item."""
        event_type = f"response.output_item.{change}"
        index = len(self.items) - 1
        return {"type": event_type, "output_index": index, "item": self.items[-1]}

    def _item_event(self, event_type: str, **fields: Any) -> Object:
        """An event about a part of the last item."""
        item = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        return {"type": f"response.{event_type}", **item, **fields}


def _end_of(token: TextLogprobs) -> int:
    """Where a token's text ends, in characters of the answer's text. It has one at least."""
    return token.start + max(1, len(token.text))


def _logprob_object(token: TextLogprobs) -> Object:
    logprob: Object = ChatLogprob.of_token(token).model_dump()
    return logprob
