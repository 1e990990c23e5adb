"""Reads calls of tools out of an answer, whatever their spelling; `tool_formats.py` has the spellings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import regex

from minisgl.server.openai.tools import ToolUse
from minisgl.server.parsing.deltas import CallArguments, CallBegin, Content, Delta
from minisgl.server.parsing.incremental import StepReader

_NO_TAIL = regex.compile("(?P<name>)")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls stand in text, as regular expressions.

    Attributes:
        opening: what begins a call anywhere, up to its arguments; its group `name` may be empty.
        again: the same where a call has just ended, and at the beginning if `opens_answer`.
        tail: what ends a call behind its arguments, if an opening brace came before them; it may bring the `name`.
        closing: what may follow the last call.
    """

    opening: str
    tail: str
    again: str = "(?!)"
    closing: str = "(?!)"
    opens_answer: bool = False


class CallReader(StepReader):
    """Hands out calls; everything else is content, but for blanks around calls and markers that are cut behind them.

    An answer that must call is held to calls by a grammar. What begins one is one, so the answer has no content, and a
    call that is cut off is handed out as far as it came, once its name is known.

    Args:
        eager: begin a call with its name, and hand out its arguments as they come; they may then turn out to be
            broken. Else a call is handed out when it is whole, and one that is broken stays content, unless the answer
            must call.
    """

    def __init__(
        self, spelling: Spelling, use: ToolUse, new_id: Callable[[], str], *, eager: bool
    ) -> None:
        super().__init__()
        self._opening, self._again, self._tail, self._closing = (
            map(  # compiled once, and then found again
                regex.compile, (spelling.opening, spelling.again, spelling.tail, spelling.closing)
            )
        )
        self._opens_answer = spelling.opens_answer
        self._names = {tool.name for tool in use.callable}
        self._new_id = new_id
        self._allows_several = use.allows_several
        self._must_call = use.must_call
        self._eager = eager or use.must_call
        self._num_calls = 0

    def _begin(self, ends: bool) -> bool:  # noqa: ARG002
        return self._go_to(self._at_next if self._opens_answer else self._in_text)

    def _in_text(self, ends: bool) -> bool:
        head = self._opening.search(self._held, partial=not ends or self._must_call)
        if head and self._is_other(head):
            self._say(Content(self._take(head.end())))
            return True
        self._say(Content(self._take(head.start() if head else len(self._held))))
        return head is not None and self._is_certain(head, ends) and self._enter(head)

    def _enter(self, head: Any) -> bool:
        self._head = self._take(head.end() - head.start())
        self._name = head["name"]
        self._arguments = ""
        self._braces = _Braces()
        self._is_said = self._eager and self._name is not None
        if self._is_said:
            self._call(CallBegin(self._num_calls, self._new_id(), self._name))
        return self._go_to(self._in_arguments)

    def _in_arguments(self, ends: bool) -> bool:
        piece = self._take(self._braces.measure(self._held))
        self._arguments += piece
        if self._is_said and piece:
            self._call(CallArguments(self._num_calls, piece))
        if self._braces.are_closed:
            return self._go_to(self._behind_arguments)
        return ends and self._give_up()

    def _behind_arguments(self, ends: bool) -> bool:
        pattern = self._tail if "{" in self._head else _NO_TAIL
        tail = pattern.match(self._held, partial=not ends or self._is_said)
        if tail and tail.partial and not ends:
            return False
        name = self._name or (tail and tail["name"])
        if not self._is_said:
            if not (tail and name in self._names and is_object(self._arguments)):
                return self._give_up()
            self._call(CallBegin(self._num_calls, self._new_id(), name))
            self._call(CallArguments(self._num_calls, self._arguments))
        self._take(tail.end() if tail else 0)
        self._num_calls += 1
        return self._go_to(self._at_next)

    def _give_up(self) -> bool:
        """What was taken for a call is content, if it has not been handed out."""
        self._say(Content("" if self._is_said else self._head + self._arguments))
        return self._go_to(self._in_text)

    def _at_next(self, ends: bool) -> bool:
        head = self._again.match(self._held, partial=not ends or self._must_call)
        if head and not self._is_certain(head, ends):
            return False
        if head and not self._is_other(head):
            return self._enter(head)
        return self._go_to(self._at_closing if self._num_calls else self._in_text)

    def _is_certain(self, head: Any, ends: bool) -> bool:
        """Whether a call has begun: where one must be and no more text will come, its name is enough."""
        return not head.partial or (ends and head["name"] in self._names)

    def _is_other(self, head: Any) -> bool:
        """Whether it calls a tool that may not be called; the name may also come behind the arguments."""
        return not head.partial and head["name"] not in {None, *self._names}

    def _at_closing(self, ends: bool) -> bool:
        closing = self._closing.match(self._held, partial=True)
        if closing and closing.partial and not ends:
            return False
        self._take(closing.end() if closing else 0)
        return self._go_to(self._in_gap)

    def _in_gap(self, ends: bool) -> bool:  # noqa: ARG002
        self._held = self._held.lstrip()
        return bool(self._held) and self._go_to(self._in_text)

    def _call(self, delta: CallBegin | CallArguments) -> None:
        if delta.index == 0 or self._allows_several:
            self._say(delta)

    def _say(self, delta: Delta) -> None:
        if not (self._must_call and isinstance(delta, Content)):
            super()._say(delta)


class _Braces:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.are_closed = False

    def measure(self, text: str) -> int:
        """Characters that belong to the object."""
        for at, char in enumerate(text):
            self._see(char)
            if self._depth == 0:
                self.are_closed = True
                return at + 1
        return len(text)

    def _see(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")


def is_object(text: str) -> bool:
    """Whether a call's arguments are whole."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
