"""Parses tool calls in any format; `tool_formats.py` has the formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import regex
from pydantic_core import from_json

from minisgl.errors import InvalidRequest
from minisgl.server.parsing.deltas import ContentDelta, ToolCallArguments, ToolCallStart
from minisgl.server.parsing.incremental import IncrementalParser
from minisgl.server.requests.tools import ToolUse

_NO_TAIL = regex.compile("(?P<name>)")
# Of arguments. A body of /v1/messages has them below five levels, and it may nest 200 deep.
MAX_DEPTH = 190


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written, as regular expressions.

    Attributes:
        opening: begins a call anywhere, up to its arguments; its group `name` may be empty.
        tail: ends a call after its arguments, if an opening brace came before them; it may have
            the `name`.
        again: an opening where a call has just ended, and at the beginning if `opens_answer`.
        closing: may follow the last call.
    """

    opening: str
    tail: str
    again: str = "(?!)"
    closing: str = "(?!)"
    opens_answer: bool = False


class ToolCallParser(IncrementalParser):
    """Emits tool calls. Other text is content.

    Blanks around calls are dropped, and so are markers after a call that are cut off.

    An answer that must call follows a grammar of calls. It has no content. If a call is cut off,
    the part that came is emitted, provided that it has the name.

    Args:
        eager: start a call when its name is known, and emit its arguments as they come; they may
            then turn out to be broken. Otherwise a call is emitted when it is whole, and a broken
            one is content, unless the answer must call.

    Raises:
        InvalidRequest: by `feed`: arguments that follow a grammar nest deeper than `MAX_DEPTH`.
            Others that do are broken.
    """

    def __init__(
        self, syntax: CallSyntax, use: ToolUse, new_id: Callable[[], str], *, eager: bool
    ) -> None:
        super().__init__()
        # regex caches compiled patterns, so this compiles each of them once.
        self._opening = regex.compile(syntax.opening)
        self._again = regex.compile(syntax.again)
        self._tail = regex.compile(syntax.tail)
        self._closing = regex.compile(syntax.closing)
        self._opens_answer = syntax.opens_answer
        self._names = {tool.name for tool in use.callable_tools}
        self._new_id = new_id
        self._allows_several_calls = use.allows_several_calls
        self._must_call = use.must_call
        self._is_enforced = use.is_enforced
        self._eager = eager or use.must_call
        self._num_calls = 0

    def _begin(self, is_last: bool) -> bool:  # noqa: ARG002 - a state
        return self._go_to(self._at_next if self._opens_answer else self._in_text)

    def _in_text(self, is_last: bool) -> bool:
        opening = self._opening.search(self._held, partial=not is_last or self._must_call)
        if opening is None:
            self._emit_content(self._take(len(self._held)))
            return False
        if self._calls_other_tool(opening):
            self._emit_content(self._take(opening.end()))
            return True
        self._emit_content(self._take(opening.start()))
        return self._is_certain(opening, is_last) and self._start_call(opening)

    def _start_call(self, opening: Any) -> bool:
        self._opening_text = self._take(opening.end() - opening.start())
        self._name = opening["name"]
        self._arguments: list[str] = []  # in pieces
        self._braces = _Braces()
        self._is_started = self._eager and self._name is not None and self._emits_next_call()
        if self._is_started:
            self._emit_call(ToolCallStart(self._num_calls, self._new_id(), self._name))
        return self._go_to(self._in_arguments)

    def _in_arguments(self, is_last: bool) -> bool:
        piece = self._take(self._braces.measure(self._held))
        if self._is_enforced and self._braces.most > MAX_DEPTH:
            raise _too_deep(self._name)
        self._arguments.append(piece)
        if self._is_started and piece:
            self._emit_arguments(piece)
        if self._braces.are_closed:
            return self._go_to(self._behind_arguments)
        return is_last and self._reject_call()

    def _behind_arguments(self, is_last: bool) -> bool:
        """Take the end of a call. Behind a name and whole arguments it may be broken, or missing.

        A stream has sent them by then, so that a whole answer must have the call, too.
        """
        pattern = self._tail if "{" in self._opening_text else _NO_TAIL
        tail = pattern.match(self._held, partial=not is_last or self._name is not None)
        if tail and tail.partial and not is_last:
            return False
        if not self._is_started:
            name = self._name or (tail and tail["name"])
            arguments = "".join(self._arguments)
            if name not in self._names or not is_object(arguments):
                return self._reject_call()
            self._emit_call(ToolCallStart(self._num_calls, self._new_id(), name))
            self._emit_arguments(arguments)
        self._take(tail.end() if tail else 0)
        self._num_calls += 1
        return self._go_to(self._at_next)

    def _reject_call(self) -> bool:
        """Make text that looked like a call content, unless it has been emitted."""
        if not self._is_started:
            self._emit_content("".join([self._opening_text, *self._arguments]))
        return self._go_to(self._in_text)

    def _at_next(self, is_last: bool) -> bool:
        opening = self._again.match(self._held, partial=not is_last or self._must_call)
        if opening and not self._is_certain(opening, is_last):
            return False
        if opening and not self._calls_other_tool(opening):
            return self._start_call(opening)
        return self._go_to(self._at_closing if self._num_calls else self._in_text)

    def _is_certain(self, opening: Any, is_last: bool) -> bool:
        """Whether a call has begun.

        At the end of an answer that must call, the name of a tool is enough.
        """
        return not opening.partial or (is_last and opening["name"] in self._names)

    def _calls_other_tool(self, opening: Any) -> bool:
        """Whether the opening names a tool that may not be called.

        The name may also come after the arguments.
        """
        return not opening.partial and opening["name"] not in {None, *self._names}

    def _at_closing(self, is_last: bool) -> bool:
        closing = self._closing.match(self._held, partial=True)
        if closing and closing.partial and not is_last:
            return False
        self._take(closing.end() if closing else 0)
        return self._go_to(self._in_gap)

    def _in_gap(self, is_last: bool) -> bool:  # noqa: ARG002 - a state
        self._take_blanks()
        return bool(self._held) and self._go_to(self._in_text)

    def _emit_arguments(self, text: str) -> None:
        """Emit arguments that were taken just now."""
        self._emit_call(ToolCallArguments(self._num_calls, text, self._start_of(text)))

    def _emit_call(self, delta: ToolCallStart | ToolCallArguments) -> None:
        if self._emits_next_call():
            self._deltas.append(delta)

    def _emits_next_call(self) -> bool:
        return self._num_calls == 0 or self._allows_several_calls

    def _emit_content(self, text: str) -> None:
        if not self._must_call:
            self._emit_text(ContentDelta, text)


def _too_deep(name: str | None) -> InvalidRequest:
    called = "a tool" if name is None else f"the tool {name!r}"
    return InvalidRequest(
        f"the model called {called} with arguments that nest more than {MAX_DEPTH} deep, which is "
        "the limit; the tool's schema allows it",
        param="tools",
        code="arguments_too_deep",
    )


class _Braces:
    """Finds the end of a JSON object that comes in pieces.

    Attributes:
        most: the depth of the deepest object or list so far, which is 1 if there is one alone.
    """

    def __init__(self) -> None:
        self._depth = 0
        self.most = 0
        self._in_string = False
        self._is_escaped = False
        self.are_closed = False

    def measure(self, text: str) -> int:
        """The number of characters that belong to the object."""
        for index, char in enumerate(text):
            self._advance(char)
            if self._depth == 0:
                self.are_closed = True
                return index + 1
        return len(text)

    def _advance(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            self.most = max(self.most, self._depth)
        elif char in "}]":
            self._depth -= 1


def is_object(text: str) -> bool:
    """Whether the arguments of a call are a whole JSON object, which a client can send back.

    Python's own parser would accept NaN and half a surrogate pair, which clients' parsers refuse.
    """
    try:
        arguments = from_json(text, allow_inf_nan=False)
    except ValueError:
        return False
    return isinstance(arguments, dict) and not _is_too_deep(arguments)


def _is_too_deep(arguments: dict[str, Any]) -> bool:
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _containers_in(parent)]
    return bool(level)


def _containers_in(parent: dict[str, Any] | list[Any]) -> list[Any]:
    """The objects and lists that are values of one."""
    values = parent.values() if isinstance(parent, dict) else parent
    return [value for value in values if isinstance(value, dict | list)]
