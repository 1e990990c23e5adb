"""What runs in a rank's process once torch is imported: its queues, its engine, its loop.

The process begins in `rank_process.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from minisgl.checkpoint import ModelConfig
from minisgl.config import SchedulerConfig
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.message import BatchSchedulerMsg, LeaderMsg, SchedulerMsg, decoder, encode
from minisgl.processes.addresses import Addresses
from minisgl.processes.child import Ready, StartupReport
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.scheduler.grammars.pending import GrammarTools
from minisgl.scheduler.io import (
    DiscardOutbox,
    FollowerLink,
    LeaderLink,
    ZmqInbox,
    ZmqOutbox,
)
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils import detect_hardware
from minisgl.utils.garbage import start_serving
from minisgl.worker_info import SchedulerInfo, encode_info

logger = logging.getLogger(__name__)

# On a CPU a step takes all cores. What answers clients needs little of one, but at once.
_NICENESS_ON_CPU = 5


def scheduler_worker(
    ready: Ready, config: SchedulerConfig, rank: int, addresses: Addresses
) -> None:
    """Run a scheduler and its engine in this process, until an ExitMsg comes.

    Rank 0 talks to the tokenizers and the detokenizer; the other ranks listen to rank 0. All ranks
    are on one machine, so they resolve options that are auto to equal values. That happens here,
    so that no other process needs torch. `rank_process.py` calls this.
    """
    config = config.resolve(detect_hardware())
    logger.debug("the hardware is known")
    if config.device == "cpu":
        os.nice(_NICENESS_ON_CPU)  # also of all threads that this one starts later
    link, outbox = _queues(config, rank, addresses, ready.beat)
    assert config.model
    assert config.device
    model = ModelConfig.from_folder(Path(config.model))
    grammar_tools = GrammarTools.of(config, model.vocab_size, model.eos_ids, leads=rank == 0)
    grammar_tools.start()  # it takes seconds, while the engine is made
    engine = Engine(config, DistributedInfo(rank, config.tp, config.ep), addresses.rendezvous)
    scheduler = Scheduler(
        config,
        engine,
        link,
        outbox,
        leads=rank == 0,
        grammar_tools=grammar_tools,
        other_ranks=link if config.tp > 1 else None,
    )
    scheduler.pending_grammars.get_ready()
    logger.debug("grammars are ready")
    start_serving()
    info = SchedulerInfo(engine.limits.max_seq_len, config.device)
    ready(StartupReport(info=encode_info(info)))
    scheduler.run()
    engine.close()
    outbox.close()


def _queues(
    config: SchedulerConfig, rank: int, addresses: Addresses, beat: Callable[[], None]
) -> tuple[LeaderLink | FollowerLink, ZmqOutbox | DiscardOutbox]:
    if rank > 0:
        from_leader: PullQueue[LeaderMsg] = PullQueue(
            addresses.rank(rank), decoder(LeaderMsg), beat
        )
        return FollowerLink(from_leader), DiscardOutbox()
    queue: PullQueue[SchedulerMsg | BatchSchedulerMsg] = PullQueue(
        addresses.scheduler, decoder(SchedulerMsg | BatchSchedulerMsg), beat
    )
    inbox = ZmqInbox(queue, PushQueue(addresses.scheduler, encode))
    followers: list[PushQueue[LeaderMsg]] = [
        PushQueue(addresses.rank(follower), encode) for follower in range(1, config.tp)
    ]
    return LeaderLink(inbox, followers), ZmqOutbox(addresses)
