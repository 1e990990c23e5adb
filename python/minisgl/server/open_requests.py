"""Requests without their final reply.

Owns those of an API process. A request that has no reply can be sent again, once, if it may be lost
with a worker. It then has a new uid, so that a reply to the old one matches no request. Questions
to the workers are in `questions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from minisgl.errors import EngineFailed
from minisgl.message import TokenizeMsg, UserReply
from minisgl.server.generation import Generation
from minisgl.server.places import Places
from minisgl.server.stopwatch import Stopwatch


@dataclass(slots=True)
class OpenRequest:
    """A request without its final reply.

    Attributes:
        deadline: when it ends with an error, by `time.monotonic`.
        unanswered: its message, until the first reply; with it the request can be sent again.
        is_second_try: whether it was sent again.
    """

    generation: Generation
    stopwatch: Stopwatch
    deadline: float
    unanswered: TokenizeMsg | None
    is_second_try: bool = False

    @property
    def can_be_sent_again(self) -> bool:
        return self.unanswered is not None and not self.is_second_try


class OpenRequests:
    """Requests by their uids. Each has a place, and gives it back when it ends."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._open: dict[int, OpenRequest] = {}
        # Of uids whose last reply is still to come.
        self._aborted: dict[int, Stopwatch] = {}
        self._first_safe_uid = 0  # aborts of smaller ones may be lost with a dead worker
        self._strays: set[int] = set()  # uids without a request, which were aborted once more

    def __len__(self) -> int:
        return len(self._open)

    @property
    def uids(self) -> list[int]:
        return list(self._open)

    @property
    def waiting(self) -> list[int]:
        """The uids of those without a reply."""
        return [uid for uid, request in self._open.items() if request.unanswered is not None]

    def begin(self, uid: int, request: OpenRequest) -> None:
        """Note a request that was sent, and has a place."""
        self._open[uid] = request

    def find(self, uid: int) -> OpenRequest | None:
        return self._open.get(uid)

    def end(self, uid: int) -> bool:
        """Count a request as open no more; returns whether it was."""
        if self._open.pop(uid, None) is None:
            return False
        self._places.give_back(1)
        return True

    def abort(self, uid: int) -> bool:
        """End a request before its last reply; returns whether it was open.

        Its late replies still say whether its prompt was computed.
        """
        request = self._open.get(uid)
        if request is None:
            return False
        self._aborted[uid] = request.stopwatch
        return self.end(uid)

    def forget_aborted(self) -> None:
        """Wait for no last replies of aborted requests: they may be lost with a worker."""
        self._aborted.clear()

    def late(self, now: float) -> set[Generation]:
        """The generations with a request whose deadline is over."""
        return {each.generation for each in self._open.values() if each.deadline < now}

    def fail(self, failure: EngineFailed) -> None:
        """End all with an error."""
        for generation in {request.generation for request in self._open.values()}:
            generation.fail(failure)
        for uid in self.uids:
            self.end(uid)

    def end_lost(self, uids: Iterable[int], failure: EngineFailed) -> list[int]:
        """End those of lost requests that cannot be sent again, and what belongs to them.

        Returns:
            the uids that have ended.
        """
        lost = [self._open[uid] for uid in uids]
        ended: list[int] = []
        for generation in {each.generation for each in lost if not each.can_be_sent_again}:
            ended += [uid for uid in generation.uids if self.end(uid)]
            generation.fail(failure)
        return ended

    def rename(self, uid: int, new_uid: int) -> TokenizeMsg:
        """Give a request that has no reply another uid; returns what is to be sent again."""
        request = self._open.pop(uid)
        request.generation.rename(uid, new_uid)
        assert request.unanswered is not None
        request.unanswered = structs.replace(request.unanswered, uid=new_uid)
        request.is_second_try = True
        self._open[new_uid] = request
        return request.unanswered

    def doubt_aborts(self, first_safe_uid: int) -> None:
        """Aborts of smaller uids may be lost with a worker."""
        self._first_safe_uid = first_safe_uid
        self._strays.clear()
        self.forget_aborted()

    def note_stray(self, reply: UserReply) -> bool:
        """Note a reply to a uid without an open request.

        Returns:
            whether to abort the uid again: once, if its first abort may be lost with a worker.
        """
        uid = reply.uid
        if uid in self._aborted:
            self._aborted[uid].observe_late(reply)
        if reply.is_final:
            self._aborted.pop(uid, None)
            self._strays.discard(uid)
            return False
        if uid >= self._first_safe_uid or uid in self._strays:
            return False
        self._strays.add(uid)
        return True
