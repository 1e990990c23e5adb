"""Where a scheduler's messages come from and where its outputs go.

The scheduler knows the protocols `Inbox`, `OtherRanks` and `Outbox`. A rank in a process of its own
has a link to the others. The link is both its `Inbox` and its `OtherRanks`, since both use one
queue.

Once a step, rank 0's `LeaderLink` sends all followers exactly the messages that it hands to its own
scheduler. With one rank there are no followers. A `FollowerLink` takes exactly one such batch of
messages per step.

Ranks make equal plans because their inputs before each step are equal, and no decision reads a
clock. Only the states of grammar matches might differ; there rank 0's count. Before a step is
launched, its plan is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from minisgl.message import (
    BatchDetokenizeMsg,
    BatchSchedulerMsg,
    DetokenizeMsg,
    EngineStats,
    LeaderMsg,
    MatchState,
    MatchStatesMsg,
    SchedulerMsg,
    ShutdownMsg,
    StepDigestMsg,
    encode,
)
from minisgl.processes.addresses import DETOKENIZER, Addresses
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.scheduler.step_digest import check_digest


class Inbox(Protocol):
    """Where messages come from."""

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        """The messages since the last call; with `block`, wait until there is one."""

    def post(self, msg: SchedulerMsg) -> None:
        """Leave a message for a later `receive`, on rank 0, from any thread."""


class OtherRanks(Protocol):
    """The other ranks of a group."""

    def compare(self, digest: StepDigestMsg) -> None:
        """Compare what this rank plans with what rank 0 plans; once a step, before its launch.

        Rank 0 never waits. The others wait until it has planned; it launches after that, and no
        rank can compute a layer before all have launched.

        Raises:
            EngineFailed: the plans differ; on the other ranks.
        """

    def share(self, states: dict[int, MatchState]) -> dict[int, MatchState]:
        """Return rank 0's states of the matches that a step has advanced, by uid.

        Rank 0 never waits. The others wait until it has advanced its own.

        Args:
            states: as this rank has found them; not empty.
        """


class Outbox(Protocol):
    """Where outputs go."""

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        """Send the outputs of one step, and the scheduler's statistics if they have changed."""

    def redirect(self, life: int) -> None:
        """Send to the detokenizer of this life from now on, if it is newer than the current one."""


class ZmqInbox:
    """The queue into which tokenizers write, or an `LLM`, which sends messages in batches.

    Args:
        writer: a writing end of the same queue, for `post`.
    """

    def __init__(
        self, queue: PullQueue[SchedulerMsg | BatchSchedulerMsg], writer: PushQueue[SchedulerMsg]
    ) -> None:
        self._queue = queue
        self._writer = writer
        self._lock = threading.Lock()

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        msgs: list[SchedulerMsg] = []
        for msg in self._queue.drain(block=block):
            msgs += msg.msgs if isinstance(msg, BatchSchedulerMsg) else [msg]
        return msgs

    def post(self, msg: SchedulerMsg) -> None:
        with self._lock:
            self._writer.put(msg)


class LeaderLink:
    """Rank 0's link to its followers, as its `Inbox` and its `OtherRanks`.

    It hands out the messages of another inbox, which the followers get too.
    """

    def __init__(self, source: Inbox, followers: list[PushQueue[LeaderMsg]]) -> None:
        self._source = source
        self._followers = followers

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        msgs = self._source.receive(block=block)
        batch = BatchSchedulerMsg(list(msgs))
        for queue in self._followers:
            queue.put(batch)
        return msgs

    def compare(self, digest: StepDigestMsg) -> None:
        for queue in self._followers:
            queue.put(digest)

    def share(self, states: dict[int, MatchState]) -> dict[int, MatchState]:
        msg = MatchStatesMsg(states)
        for queue in self._followers:
            queue.put(msg)
        return states

    def post(self, msg: SchedulerMsg) -> None:
        self._source.post(msg)


class FollowerLink:
    """A follower's link to rank 0, the leader, as its `Inbox` and its `OtherRanks`.

    It hands out the leader's messages, one batch per step. `receive`, `compare` and `share` wait
    for the leader, which goes first.
    """

    def __init__(self, queue: PullQueue[LeaderMsg]) -> None:
        self._queue = queue

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:  # noqa: ARG002 - the leader decides
        batch = self._queue.get()
        assert isinstance(batch, BatchSchedulerMsg)
        return batch.msgs

    def compare(self, digest: StepDigestMsg) -> None:
        msg = self._queue.get()
        assert isinstance(msg, StepDigestMsg)
        check_digest(digest, msg)

    def share(self, states: dict[int, MatchState]) -> dict[int, MatchState]:
        msg = self._queue.get()
        assert isinstance(msg, MatchStatesMsg)
        assert msg.states.keys() == states.keys()
        return msg.states

    def post(self, msg: SchedulerMsg) -> None:
        raise AssertionError(f"{msg} is for the leader to post")


class ZmqOutbox:
    """The detokenizer's queue, and that of its successor once it is replaced."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._queue = self._connect()

    def _connect(self) -> PushQueue[BatchDetokenizeMsg | ShutdownMsg]:
        return PushQueue(self._addresses.detokenizer, encode)

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        if stats is not None:
            stats = msgspec.structs.replace(stats, epoch=self._addresses.epoch)
        self._queue.put(BatchDetokenizeMsg(msgs, stats))

    def redirect(self, life: int) -> None:
        if life > self._addresses.life_of(DETOKENIZER):
            self._queue.drop()
            self._addresses = self._addresses.in_life(DETOKENIZER, life)
            self._queue = self._connect()

    def close(self) -> None:
        """Let the detokenizer end after what was sent.

        One that also tokenizes was ended before this process, by the API process. A message to it
        would wait for a second.
        """
        if DETOKENIZER not in self._addresses.tokenizer_names:
            self._queue.put(ShutdownMsg())
        self._queue.close()


class DiscardOutbox:
    """Drops the outputs: only rank 0 sends them."""

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        pass

    def redirect(self, life: int) -> None:
        pass

    def close(self) -> None:
        pass
