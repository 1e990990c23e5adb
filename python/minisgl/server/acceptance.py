"""Whether an API process accepts requests now, and how many may be open."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from minisgl.errors import EngineFailed, QueueFull, Unavailable
from minisgl.processes.shared_numbers import SharedNumbers
from minisgl.server.places import Places


class Acceptance:
    """Gives places to requests and questions, or an error that says why they are refused.

    Each refused request gets a new error object: one that is raised again keeps alive the frames in
    which it was raised before.

    Args:
        max_open: requests and questions in all API processes.
        shared: numbers that all of them share.

    Attributes:
        outage: makes an error that says why there are no workers; None while there are.
    """

    def __init__(self, max_open: int, shared: SharedNumbers) -> None:
        self.places = Places("open-requests", max_open, shared)
        self._end_of_server: Callable[[], Unavailable | EngineFailed] | None = None
        self.outage: Callable[[], Unavailable] | None = None

    @property
    def refusal(self) -> Unavailable | EngineFailed | None:
        """An error, each time a new one, that says why no request is accepted now; or None."""
        make_error = self._end_of_server or self.outage
        return make_error and make_error()

    @property
    def will_end(self) -> bool:
        """Whether nothing is accepted any more, because the server ends."""
        return self._end_of_server is not None

    def take_places(self, number: int) -> None:
        """Count requests or questions as open.

        Raises:
            QueueFull: too many are open.
            Unavailable: no request is accepted now.
            EngineFailed: the engine is gone.
        """
        if self.refusal:
            raise self.refusal
        if not self.places.try_take(number):
            raise QueueFull(number, self.places.num_taken, self.places.limit)

    def refuse(self, reason: str) -> None:
        """Accept nothing from now on, because the server will end."""
        self._end_of_server = partial(Unavailable, reason)

    def fail(self, reason: str) -> None:
        """Accept nothing from now on, because the engine is gone."""
        self._end_of_server = partial(EngineFailed, reason)

    def suspend(self, reason: str, outage_s: int) -> Unavailable:
        """Accept nothing for about `outage_s` seconds. Returns an error that says why."""
        self.outage = partial(Unavailable, f"the engine starts again: {reason}", outage_s)
        return self.outage()

    def resume(self) -> None:
        """There are workers again."""
        self.outage = None
