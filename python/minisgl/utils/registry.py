"""A table from names to things, filled by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from minisgl.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of thing. `kind` appears in the error for an unknown name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(thing: T) -> T:
            assert name not in self._things
            self._things[name] = thing
            return thing

        return add

    @property
    def names(self) -> list[str]:
        return sorted(self._things)

    def __getitem__(self, name: str) -> T:
        """
        Raises:
            ConfigError: names the kind, the name, and what there is.
        """
        if name not in self._things:
            raise ConfigError(f"unknown {self._kind} {name!r}; there is {', '.join(self.names)}")
        return self._things[name]
