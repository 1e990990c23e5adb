"""What each child process runs: its queues, its part of the engine, its loop."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.errors import ConfigError, MiniSGLError
from minisgl.message import (
    BackendMsg,
    BatchBackendMsg,
    FrontendMsg,
    ShutdownMsg,
    TokenizerMsg,
    decoder,
    encode,
)
from minisgl.scheduler import FollowerInbox, Inbox, LeaderInbox, Scheduler, SchedulerConfig, ZmqInbox, ZmqOutbox
from minisgl.scheduler.io import DiscardOutbox, Outbox
from minisgl.server.supervisor import Report
from minisgl.tokenizer import tokenize_worker
from minisgl.utils import die_with_parent, set_up_logging
from minisgl.utils.mp import PullQueue, PushQueue

logger = logging.getLogger(__name__)


class Addresses:
    """Where the queues of one server are, given the folder that they share."""

    def __init__(self, folder: Path, num_tokenizer: int) -> None:
        self.frontend = f"ipc://{folder}/frontend"
        self.backend = f"ipc://{folder}/backend"
        self.detokenizer = f"ipc://{folder}/detokenizer"
        self.tokenizers = [f"ipc://{folder}/tokenizer-{i}" for i in range(num_tokenizer)] or [self.detokenizer]
        self.meeting = folder / "meeting"

    def rank(self, rank: int) -> str:
        return f"ipc://{self.meeting.parent}/rank-{rank}"


Ready = Callable[[Report], None]


def run_worker(
    name: str,
    parent_pid: int,
    connection: Connection,
    log_level: str,
    body: Callable[..., None],
    *args: Any,
) -> None:
    """Entry of every child: tie it to its parent, run its body, and report what goes wrong before it is ready.

    Interrupts are the parent's affair: it asks the children to end.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up_logging(name, log_level)

    def report(content: Report) -> None:
        connection.send_bytes(msgspec.json.encode(content))

    try:
        body(report, *args)
    except Exception as error:  # the border of the process: said once, then the supervisor acts
        if isinstance(error, MiniSGLError):
            logger.debug("%s", traceback.format_exc())
        else:
            logger.exception("%s fails", name)
        reason = str(error) if isinstance(error, MiniSGLError) else f"{name}: {type(error).__name__}: {error}"
        report(Report(failure=reason, is_users_fault=isinstance(error, ConfigError)))
        connection.close()
        os._exit(1)


def scheduler_body(ready: Ready, config: SchedulerConfig, rank: int, addresses: Addresses) -> None:
    """A scheduler and its engine. Rank 0 talks to the tokenizers, the others listen to rank 0."""
    inbox, outbox = _leader_queues(config, addresses) if rank == 0 else _follower_queues(rank, addresses)
    engine = Engine(config, DistributedInfo(rank, config.tp), addresses.meeting)
    scheduler = Scheduler(config, engine, inbox, outbox)
    ready(Report(max_seq_len=engine.limits.max_seq_len))
    scheduler.run()
    engine.close()
    if rank == 0:
        last = PushQueue[ShutdownMsg](addresses.detokenizer, encode)
        last.put(ShutdownMsg())
        last.close()


def _leader_queues(config: SchedulerConfig, addresses: Addresses) -> tuple[Inbox, Outbox]:
    inbox: Inbox = ZmqInbox(PullQueue(addresses.backend, decoder(BackendMsg)))
    if config.tp > 1:
        inbox = LeaderInbox(inbox, [PushQueue(addresses.rank(rank), encode) for rank in range(1, config.tp)])
    return inbox, ZmqOutbox(PushQueue(addresses.detokenizer, encode))


def _follower_queues(rank: int, addresses: Addresses) -> tuple[Inbox, Outbox]:
    return FollowerInbox(PullQueue(addresses.rank(rank), decoder(BatchBackendMsg))), DiscardOutbox()


def tokenizer_body(ready: Ready, folder: Path, inbox: str, addresses: Addresses) -> None:
    """A tokenizer, the detokenizer, or both, as `inbox` says."""
    torch.set_num_threads(1)
    tokenize_worker(
        folder,
        PullQueue[TokenizerMsg](inbox, decoder(TokenizerMsg)),
        PushQueue[BackendMsg](addresses.backend, encode),
        PushQueue[FrontendMsg](addresses.frontend, encode),
        lambda: ready(Report()),
    )
