"""The ranks of a tensor-parallel `LLM`: processes of their own, rank 0 among them.

A rank that waits for a dead one, in a collective on a CPU or in a kernel of NCCL, cannot be
interrupted from Python; only the end of its process ends the wait. So no rank runs in the process
of the caller, which waits for messages alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Self

from minisgl.checkpoint import ModelConfig
from minisgl.config import SchedulerConfig
from minisgl.errors import EngineFailed
from minisgl.message import (
    BatchDetokenizeMsg,
    BatchSchedulerMsg,
    DetokenizeMsg,
    ExitMsg,
    SchedulerMsg,
    ShutdownMsg,
    decoder,
    encode,
)
from minisgl.processes.addresses import Addresses
from minisgl.processes.private_folder import private_folder
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.processes.supervisor import Supervisor
from minisgl.rank_counts import check_rank_count

_START_TIMEOUT_S = 900.0


class RankGroup:
    """The schedulers of a group, with the methods of a `LocalRank`.

    When a rank dies, the others are killed at once, also between two calls.

    Raises:
        ConfigError: an option or the model cannot work.
        EngineFailed: a rank did not start.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.model
        check_rank_count(config.tp, ModelConfig.from_folder(Path(config.model)), ep=config.ep)
        self.is_running = True
        self._posted: list[SchedulerMsg] = []
        self._unread: list[DetokenizeMsg] = []
        with ExitStack() as stack:
            addresses = Addresses(stack.enter_context(private_folder()))
            self._outputs: PullQueue[BatchDetokenizeMsg | ShutdownMsg] = PullQueue(
                addresses.detokenizer, decoder(BatchDetokenizeMsg | ShutdownMsg)
            )
            stack.callback(self._outputs.close)
            self._inbox: PushQueue[BatchSchedulerMsg] = PushQueue(addresses.scheduler, encode)
            stack.callback(self._inbox.close)
            self._supervisor = stack.enter_context(Supervisor("WARNING"))
            for rank in range(config.tp):
                body = "minisgl.rank_process:run_rank"
                self._supervisor.start(f"scheduler-{rank}", body, config, rank, addresses)
            self._supervisor.wait_ready(_START_TIMEOUT_S)
            self._supervisor.end_together()
            self._resources = stack.pop_all()

    def post(self, msg: SchedulerMsg) -> None:
        """Leave a message for the next `step`."""
        self._posted.append(msg)

    def step(self) -> None:
        """Send what was posted, together. If nothing was, wait for outputs.

        So the caller may have more to post while the ranks work on this.

        Raises:
            EngineFailed: a rank died; the message names it.
        """
        posted = self._posted
        self._posted = []  # first: a stream that is closed meanwhile posts, too
        if posted:
            self._inbox.put(BatchSchedulerMsg(posted))
        self.is_running = not any(isinstance(msg, ExitMsg) for msg in posted)
        if not self.is_running:
            return
        sentinels = self._supervisor.sentinels
        lives = not wait(sentinels, timeout=0) if posted else self._outputs.wait(*sentinels)
        if not lives:
            raise EngineFailed(self._supervisor.death())
        for batch in self._outputs.drain():
            if isinstance(batch, BatchDetokenizeMsg):
                self._unread += batch.msgs

    def drain_outputs(self) -> list[DetokenizeMsg]:
        """Remove and return what has come."""
        msgs = self._unread
        self._unread = []
        return msgs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait a few seconds until the ranks have ended, then kill them; after an error at once."""
        self._resources.__exit__(kind, error, trace)
