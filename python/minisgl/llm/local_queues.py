"""The queues of a scheduler in this process: in memory, in place of sockets."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from minisgl.message import DetokenizeMsg, EngineStats, SchedulerMsg


class LocalQueues:
    """The scheduler's inbox and outbox. Any thread may post, as those that compile grammars do."""

    def __init__(self) -> None:
        self._to_scheduler: SimpleQueue[SchedulerMsg] = SimpleQueue()
        self._from_scheduler: list[DetokenizeMsg] = []

    def post(self, msg: SchedulerMsg) -> None:
        """Leave a message for the scheduler's next step."""
        self._to_scheduler.put(msg)

    def drain_outputs(self) -> list[DetokenizeMsg]:
        """Remove and return what the scheduler has sent."""
        msgs = self._from_scheduler
        self._from_scheduler = []
        return msgs

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        msgs = [self._to_scheduler.get()] if block else []
        while not self._to_scheduler.empty():
            msgs.append(self._to_scheduler.get())
        return msgs

    # The outbox's contract has stats; nothing here shows them.
    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:  # noqa: ARG002
        self._from_scheduler += msgs

    def redirect(self, life: int) -> None:
        raise AssertionError(f"there is no detokenizer, and so none of life {life}")
