"""The names that a regular expression matches, where these are few.

Read are patterns from ^ to $ of letters, digits, blanks and hyphens, with classes, groups and
counts: ^[ab]$, ^(north|south)[1-4]?$, ^a$|^b$. Rust and Python read those alike.
"""

from __future__ import annotations

import re

_MAX_DEPTH = 32  # of groups
_MAX_NAMES = 1_000
_MAX_NAME = 256  # characters
_MAX_WORK = 2**20  # characters of names, and parts of names, of all patterns of a schema
_ITEM = r"[\w ]-[\w ]|[\w ]"
_TOKEN = re.compile(
    rf"(?P<char>[\w -])|\[(?P<items>(?:{_ITEM})+-?)\]|(?P<open>\((?:\?:)?)|(?P<mark>[)|^$])"
    r"|(?:\?|\{(?P<least>[0-9]{1,3})(?P<most>,[0-9]{1,3})?\})(?![?*+{])"
)


class _NotFewError(Exception):
    """A pattern matches too many names, or is written in another way."""


class FewNames:
    """Finds the names of the patterns of one schema, in bounded time."""

    def __init__(self) -> None:
        self._room = _MAX_WORK

    def of(self, pattern: str, limit: int = _MAX_NAMES) -> set[str]:
        """The names that a pattern matches; none if there are more than the limit, or no telling.

        Args:
            limit: above 1,000 it is 1,000.
        """
        try:
            reader = _Pattern(pattern, min(limit, _MAX_NAMES), self._room)
        except _NotFewError:
            return set()
        try:
            return reader.names()
        except _NotFewError:
            return set()
        finally:
            self._room = reader.room


class _Pattern:
    def __init__(self, pattern: str, limit: int, room: int) -> None:
        self._limit = limit
        self.room = room
        self._tokens: list[re.Match[str]] = []
        end = 0
        while end < len(pattern):
            token = _TOKEN.match(pattern, end)
            if token is None:
                raise _NotFewError
            self._tokens.append(token)
            end = token.end()
        self._tokens.reverse()  # the next one is the last

    def names(self) -> set[str]:
        names: set[str] = set()
        while True:
            self._expect("^")
            names |= self._sequence(0)
            self._expect("$")
            if not self._tokens:
                return self._few(names)
            self._expect("|")

    def _alternatives(self, depth: int) -> set[str]:
        """Those of a group, up to its end."""
        if depth > _MAX_DEPTH:
            raise _NotFewError
        names = self._sequence(depth)
        while self._next_mark() == "|":
            self._tokens.pop()
            names |= self._sequence(depth)
        self._expect(")")
        return self._few(names)

    def _sequence(self, depth: int) -> set[str]:
        names = {""}
        while self._tokens and self._next_mark() is None:
            names = self._joined(names, self._counted(self._part(depth)))
        return names

    def _part(self, depth: int) -> set[str]:
        """A character, a class or a group."""
        token = self._tokens.pop()
        if token["char"]:
            return {token["char"]}
        if token["items"]:
            return self._class(token["items"])
        if token["open"]:
            return self._alternatives(depth + 1)
        raise _NotFewError

    def _class(self, items: str) -> set[str]:
        names: set[str] = set()
        for item in re.findall(rf"{_ITEM}|-", items):
            first = ord(item[0])
            last = ord(item[-1])
            if not 0 <= last - first < self._limit:
                raise _NotFewError
            names.update(map(chr, range(first, last + 1)))
        return self._few(names)

    def _counted(self, names: set[str]) -> set[str]:
        """The names of a part, as often as the count behind it says."""
        token = self._tokens[-1] if self._tokens else None
        if token is None or token["char"] or token["items"] or token["open"] or token["mark"]:
            return names
        self._tokens.pop()
        least = int(token["least"] or 0)
        most = int((token["most"] or "")[1:] or token["least"] or 1)
        repeated = {""}
        counted: set[str] = set()
        for number in range(most + 1):
            if number >= least:
                counted |= repeated
            if number < most:
                repeated = self._joined(repeated, names)
        return self._few(counted)

    def _joined(self, firsts: set[str], lasts: set[str]) -> set[str]:
        if len(firsts) * len(lasts) > self._limit:
            raise _NotFewError
        names = {first + last for first in firsts for last in lasts}
        self.room -= sum(map(len, names))
        if self.room < 0 or max(map(len, names)) > _MAX_NAME:
            raise _NotFewError
        return names

    def _few(self, names: set[str]) -> set[str]:
        if len(names) > self._limit:
            raise _NotFewError
        return names

    def _next_mark(self) -> str | None:
        """A parenthesis that closes, a bar or an anchor, if it comes next."""
        mark: str | None = self._tokens[-1]["mark"] if self._tokens else None
        return mark

    def _expect(self, mark: str) -> None:
        if self._next_mark() != mark:
            raise _NotFewError
        self._tokens.pop()
