"""Ranks as processes: each has an engine and a scheduler, connected as those of a server are.

All jobs of a group run in one launch, because ranks take seconds to meet. They are forked from a
process that has imported what they need and has no thread. With GPUs they are spawned: tvm-ffi asks
for CUDA when it is imported, and after that a fork cannot use it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from minisgl.distributed import DistributedInfo
from minisgl.message import (
    LeaderMsg,
    UserMsg,
    decoder,
    encode,
    pack_ids,
)
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.scheduler import FollowerLink, LeaderLink, Scheduler
from tests.engine.harness import (
    Answer,
    MemoryInbox,
    MemoryOutbox,
    Prompt,
    WatchedEngine,
    collect,
    config_of,
    greedy,
)

T = TypeVar("T")
TIMEOUT_S = 120


@dataclass(frozen=True)
class Job:
    """Prompts for one checkpoint, in rounds; a round is sent when the one before has finished."""

    model: Path
    rounds: list[list[Prompt]]
    num_tokens: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for prompts in self.rounds for prompt in prompts]


class RoundsInbox(MemoryInbox):
    """Hands out a round whenever the scheduler is idle, and the end after the last."""

    def __init__(self, rounds: list[list[UserMsg]]) -> None:
        super().__init__()
        self._rounds = rounds

    def receive(self, *, block: bool) -> list[Any]:
        if block and self._rounds:
            self.msgs = list(self._rounds.pop(0))
        return super().receive(block=block)


def run_ranks(tp: int, jobs: list[Job], folder: Path) -> list[list[list[Answer]]]:
    """Answers by rank, job and prompt; each rank has the logits of its tokens."""
    return in_processes(tp, partial(_run_all, jobs, folder))


def in_processes(size: int, work: Callable[[DistributedInfo], T]) -> list[T]:
    """What `work`, which can be pickled, returns on each rank.

    Raises:
        RuntimeError: a rank failed; the message is its traceback. The other ranks are killed, since
            they would wait for it.
    """
    context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
    if not torch.cuda.is_available():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
    readers: list[Connection] = []
    processes: list[BaseProcess] = []
    for rank in range(size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(DistributedInfo(rank, size), work, writer), daemon=True
        )
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        return _results(readers)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(readers: list[Connection]) -> list[Any]:
    """Wait for the results of all ranks, of which each has a pipe."""
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        waiting = {reader: i for i, reader in enumerate(readers) if i not in results}
        ready = wait(list(waiting), timeout=TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"ranks {list(waiting.values())} are stuck")
        failures: list[tuple[float, str]] = []
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting[reader]
            at_s, result, trace = pickle.loads(reader.recv_bytes())  # EOFError if the process died
            if trace is not None:
                failures.append((at_s, f"rank {rank} failed:\n{trace}"))
            results[rank] = result
        if failures:  # the first one is the cause of the others
            raise RuntimeError(min(failures)[1])
    return [results[rank] for rank in range(len(readers))]


def _rank(
    info: DistributedInfo, work: Callable[[DistributedInfo], Any], writer: Connection
) -> None:
    # `send` would share the memory of tensors, which ends with this process.
    try:
        writer.send_bytes(pickle.dumps((time.monotonic(), work(info), None)))
    except Exception:  # told before the engine is freed, which would let the other ranks fail
        writer.send_bytes(pickle.dumps((time.monotonic(), None, traceback.format_exc())))


def _run_all(jobs: list[Job], folder: Path, info: DistributedInfo) -> list[list[Answer]]:
    return [_run(info, job, folder / str(index)) for index, job in enumerate(jobs)]


def _run(info: DistributedInfo, job: Job, folder: Path) -> list[Answer]:
    folder.mkdir(exist_ok=True, parents=True)
    config = config_of(job.model, tp=info.size, **job.options)
    info = replace(info, ep=config.ep)
    link = _link(info, job, folder)
    engine = WatchedEngine(config, info, folder / "rendezvous")
    outbox = MemoryOutbox()
    Scheduler(config, engine, link, outbox, other_ranks=link).run()
    engine.close()
    answers = collect(outbox.msgs, engine)
    return [answers[uid] for uid in range(len(job.prompts))]


def _link(info: DistributedInfo, job: Job, folder: Path) -> LeaderLink | FollowerLink:
    addresses = [f"ipc://{folder}/{rank}" for rank in range(info.size)]
    if not info.leads:
        return FollowerLink(PullQueue(addresses[info.rank], decoder(LeaderMsg)))
    uids = iter(range(len(job.prompts)))
    rounds = [
        [UserMsg(next(uids), pack_ids(p), greedy(job.num_tokens)) for p in prompts]
        for prompts in job.rounds
    ]
    return LeaderLink(
        RoundsInbox(rounds), [PushQueue(address, encode) for address in addresses[1:]]
    )
