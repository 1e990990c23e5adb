"""A scheduler and its engine in this process, with the methods of a `RankGroup`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import Self

import torch

from minisgl.config import SchedulerConfig
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.errors import EngineFailed
from minisgl.llm.local_queues import LocalQueues
from minisgl.message import DetokenizeMsg, SchedulerMsg
from minisgl.scheduler import Scheduler
from minisgl.utils import detect_hardware


class LocalRank:
    """The only rank of an `LLM`. A step runs in the caller's thread.

    Raises:
        ConfigError: an option or the model cannot work.
        EngineFailed: this process is a fork of one that has made an engine.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        config = config.resolve(detect_hardware())
        self._queues = LocalQueues()
        _check_can_compute()
        with ExitStack() as stack:
            engine = Engine(config, DistributedInfo())
            stack.callback(engine.close)
            self.scheduler = Scheduler(config, engine, self._queues, self._queues)
            self._resources = stack.pop_all()

    @property
    def is_running(self) -> bool:
        return self.scheduler.is_running

    def post(self, msg: SchedulerMsg) -> None:
        """Leave a message for the next `step`."""
        self._queues.post(msg)

    def step(self) -> None:
        """Make a step of the scheduler."""
        self.scheduler.step()

    def drain_outputs(self) -> list[DetokenizeMsg]:
        """Remove and return the outputs of steps since the last call."""
        return self._queues.drain_outputs()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the engine."""
        self._resources.__exit__(kind, error, trace)


@cache
def _pid_of_threads() -> int:
    """Return the process that began the first engine; a fork remembers its parent's.

    From then on torch may have threads.
    """
    return os.getpid()


def _check_can_compute() -> None:
    """Check that torch's threads are in this process: a fork would wait for them without end."""
    pid = _pid_of_threads()
    if pid != os.getpid() and torch.get_num_threads() > 1:
        raise EngineFailed(
            f"this is a fork of the process {pid}, in which an LLM was begun: torch's threads are "
            'not in it. Start processes by multiprocessing.get_context("spawn")'
        )
