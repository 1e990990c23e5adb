"""A rank that plans another step than rank 0 ends with that step's number, before it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.message import (
    AbortMsg,
    LeaderMsg,
    SchedulerMsg,
    UserMsg,
    decoder,
    encode,
    pack_ids,
)
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.scheduler import FollowerLink, LeaderLink, Scheduler
from tests.distributed.harness import in_processes
from tests.engine.harness import MemoryInbox, MemoryOutbox, config_of, greedy

ABORTED_BEFORE_STEP = 3


class AbortingInbox(MemoryInbox):
    """Two requests at once, and the abort of one of them a few turns later."""

    def __init__(self) -> None:
        super().__init__()
        self.msgs = [UserMsg(uid, pack_ids([1, 2, 3]), greedy(10)) for uid in range(2)]
        self._num_turns = 0

    def receive(self, *, block: bool) -> list[SchedulerMsg]:
        if self._num_turns == ABORTED_BEFORE_STEP:
            self.post(AbortMsg(1))
        self._num_turns += 1
        return super().receive(block=block)


class DeafLink(FollowerLink):
    """Misses all aborts."""

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        msgs = super().receive(block=block)
        return [msg for msg in msgs if not isinstance(msg, AbortMsg)]


def run_rank(model: Path, folder: Path, info: DistributedInfo) -> None:
    config = config_of(model, tp=info.size, num_pages=16)
    address = f"ipc://{folder}/queue"
    link: LeaderLink | FollowerLink
    if info.leads:
        link = LeaderLink(AbortingInbox(), [PushQueue(address, encode)])
    else:
        link = DeafLink(PullQueue(address, decoder(LeaderMsg)))
    engine = Engine(config, info, folder / "rendezvous")
    Scheduler(config, engine, link, MemoryOutbox(), leads=info.leads, other_ranks=link).run()


def test_a_rank_that_misses_an_abort_names_the_step(checkpoint: Callable[[str], Path]) -> None:
    words = f"the ranks plan step {ABORTED_BEFORE_STEP} differently: num_requests 2 here, 1 on rank"
    with TemporaryDirectory() as folder, pytest.raises(RuntimeError) as failure:
        in_processes(2, partial(run_rank, checkpoint("llama"), Path(folder)))
    assert "rank 1 failed" in str(failure.value)
    assert words in str(failure.value)
