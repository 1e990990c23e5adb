"""How many requests, or connections, are open in all API processes together, and may be."""

from __future__ import annotations

from minisgl.processes.shared_numbers import SharedNumbers


class Places:
    """A limit, and how much of it is taken by all API processes together.

    Args:
        name: of what is counted; all processes use one for it.
        shared: numbers that all of them share.
    """

    def __init__(self, name: str, limit: int, shared: SharedNumbers) -> None:
        self.limit = limit
        self._shared = shared
        self._num_taken = shared.array(name, 1)

    @property
    def num_taken(self) -> int:
        return int(self._num_taken[0])

    def try_take(self, number: int) -> bool:
        """Take `number` places, if there are as many left; returns whether there were."""
        with self._shared.locked():
            has_places = self.num_taken + number <= self.limit
            if has_places:
                self._num_taken[0] += number
        return has_places

    def give_back(self, number: int) -> None:
        with self._shared.locked():
            self._num_taken[0] -= number
