"""Ranks as processes: each makes an engine and a scheduler, and they talk as those of a server do.

All jobs of a group run in one launch, for a process costs seconds before it does anything.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from minisgl.distributed import DistributedInfo
from minisgl.message import BatchBackendMsg, UserMsg, decoder, encode, pack_ids
from minisgl.scheduler import FollowerInbox, LeaderInbox, Scheduler
from minisgl.utils.mp import PullQueue, PushQueue
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

TIMEOUT_S = 120


@dataclass(frozen=True)
class Job:
    """Prompts for one checkpoint, sent in rounds of which each waits for the one before."""

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
    """Answers by rank, job and prompt; those of ranks other than 0 have no logits.

    Raises:
        RuntimeError: a rank failed; carries its traceback. The other ranks are killed, they would wait for it.
    """
    spawn = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(tp):
        mine, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=_rank, args=(DistributedInfo(rank, tp), jobs, folder, theirs), daemon=True
        )
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    try:
        return _results(ends)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(ends: list[Connection]) -> list[list[list[Answer]]]:
    results: dict[Connection, list[list[Answer]]] = {}
    while len(results) < len(ends):
        ready = wait([end for end in ends if end not in results], timeout=TIMEOUT_S)
        if not ready:
            raise RuntimeError(
                f"ranks {[i for i, end in enumerate(ends) if end not in results]} are stuck"
            )
        for end in ready:
            result = pickle.loads(end.recv_bytes())  # EOFError if the process died
            if isinstance(result, str):
                raise RuntimeError(f"rank {ends.index(end)} failed:\n{result}")
            results[end] = result
    return [results[end] for end in ends]


def _rank(info: DistributedInfo, jobs: list[Job], folder: Path, result: Connection) -> None:
    try:
        answer: Any = [_run(info, job, folder / str(index)) for index, job in enumerate(jobs)]
    except Exception:
        answer = traceback.format_exc()
    result.send_bytes(
        pickle.dumps(answer)
    )  # `send` would share the memory of tensors, which ends with this process


def _run(info: DistributedInfo, job: Job, folder: Path) -> list[Answer]:
    folder.mkdir(exist_ok=True, parents=True)
    config = config_of(job.model, tp=info.size, **job.options)
    inbox = _inbox(info, job, folder)
    engine = WatchedEngine(config, info, folder / "rendezvous")
    outbox = MemoryOutbox()
    Scheduler(config, engine, inbox, outbox).run()
    engine.close()
    answers = collect(outbox.msgs, engine)
    return [answers[uid] for uid in range(len(job.prompts))]


def _inbox(info: DistributedInfo, job: Job, folder: Path) -> LeaderInbox | FollowerInbox:
    addresses = [f"ipc://{folder}/{rank}" for rank in range(info.size)]
    if not info.is_primary:
        return FollowerInbox(PullQueue(addresses[info.rank], decoder(BatchBackendMsg)))
    uids = iter(range(len(job.prompts)))
    rounds = [
        [UserMsg(next(uids), pack_ids(p), greedy(job.num_tokens)) for p in prompts]
        for prompts in job.rounds
    ]
    return LeaderInbox(
        RoundsInbox(rounds), [PushQueue(address, encode) for address in addresses[1:]]
    )
