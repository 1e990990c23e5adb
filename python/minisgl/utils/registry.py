"""A table from names to values, filled by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from minisgl.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Values of one kind, by name. `kind` appears in the error for an unknown name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._values: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds its argument under the name, and returns it."""

        def add(value: T) -> T:
            assert name not in self._values
            self._values[name] = value
            return value

        return add

    @property
    def names(self) -> list[str]:
        return sorted(self._values)

    def __getitem__(self, name: str) -> T:
        """
        Raises:
            ConfigError: unknown name; the message has the kind, the name and all known names.
        """
        if name not in self._values:
            raise ConfigError(f"unknown {self._kind} {name!r}; there is {', '.join(self.names)}")
        return self._values[name]
