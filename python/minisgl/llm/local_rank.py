"""A scheduler and its engine in this process, with the methods of a `RankGroup`."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from minisgl.config import SchedulerConfig
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.llm.local_queues import LocalQueues
from minisgl.message import DetokenizeMsg, SchedulerMsg
from minisgl.scheduler import Scheduler
from minisgl.utils import detect_hardware


class LocalRank:
    """The only rank of an `LLM`. A step runs in the caller's thread.

    Raises:
        ConfigError: an option or the model cannot work.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        config = config.resolve(detect_hardware())
        self._queues = LocalQueues()
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
