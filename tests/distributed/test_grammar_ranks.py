"""Ranks whose own matches of a grammar fail in different steps stay together: rank 0's counts.

Answers share an automaton, which grows as it is asked for masks. A mask may take so much work, and
whoever needs a new state first pays for it. Threads of a GPU's scheduler ask in any order.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from llguidance import LLParserLimits

from minisgl.core import Grammar, IntArray, SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.grammar import compiler
from minisgl.message import (
    DetokenizeMsg,
    EngineStats,
    ExitMsg,
    LeaderMsg,
    SchedulerMsg,
    UserMsg,
    decoder,
    encode,
    pack_ids,
)
from minisgl.processes.queues import PullQueue, PushQueue
from minisgl.scheduler import FollowerInbox, LeaderInbox, Scheduler
from minisgl.scheduler.grammars import matchers
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from tests.distributed.harness import in_processes
from tests.engine.harness import config_of

HOSTILE = Grammar("regex", "(a|b)*a(a|b){24}c")
NUM_ROUNDS = 6
NUM_ANSWERS = 3  # of a round
WORK = LLParserLimits(step_lexer_fuel=700)  # of a mask; whoever needs a state first pays for it


class Client:
    """Inbox and outbox of rank 0: sends a round when the one before is answered, then the end."""

    def __init__(self) -> None:
        self.ends: list[str] = []  # finish reasons and errors, as they come
        self._posted: queue.SimpleQueue[SchedulerMsg] = queue.SimpleQueue()
        self._num_rounds = 0
        self._num_open = 0

    def receive(self, *, block: bool) -> list[SchedulerMsg]:
        if self._num_open == 0:
            self._ask()
        msgs = [self._posted.get()] if block else []
        while not self._posted.empty():
            msgs.append(self._posted.get())
        return msgs

    def _ask(self) -> None:
        if self._num_rounds == NUM_ROUNDS:
            self.post(ExitMsg())
            return
        first = self._num_rounds * NUM_ANSWERS
        for uid in range(first, first + NUM_ANSWERS):
            params = SamplingParams(max_tokens=200, seed=uid, temperature=2.0, grammar=HOSTILE)
            self.post(UserMsg(uid, pack_ids([1, 2, 3]), params))
        self._num_rounds += 1
        self._num_open = NUM_ANSWERS

    def post(self, msg: SchedulerMsg) -> None:
        self._posted.put(msg)

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        for msg in msgs:
            if msg.error or msg.finish:
                self.ends.append(msg.error.message if msg.error else str(msg.finish))
                self._num_open -= 1


def fill_backwards(matches: list[Any], masks_XW: IntArray) -> Any:
    return in_order(matches[::-1], masks_XW)


in_order = matchers._fill_each


def run_rank(model: Path, folder: Path, info: DistributedInfo) -> tuple[list[str], int]:
    """How answers end, as rank 0 says, and how many matches this rank loses."""
    compiler._LIMITS["regex"] = WORK
    address = f"ipc://{folder}/queue"
    client = Client()
    inbox: LeaderInbox | FollowerInbox
    if info.leads:
        inbox = LeaderInbox(client, [PushQueue(address, encode)])
    else:
        inbox = FollowerInbox(PullQueue(address, decoder(LeaderMsg)))
        matchers._fill_each = fill_backwards
    config = config_of(model, tp=info.size)
    engine = Engine(config, info, folder / "rendezvous")
    with patch.object(
        GrammarMatchers, "lose_match", autospec=True, side_effect=GrammarMatchers.lose_match
    ) as lose:
        Scheduler(config, engine, inbox, client, leads=info.leads, other_ranks=inbox).run()
    return client.ends, lose.call_count


def test_ranks_stay_together_that_meet_a_grammars_limits_in_other_orders(
    checkpoint: Callable[[str], Path],
) -> None:
    with TemporaryDirectory() as folder:
        ranks = in_processes(2, partial(run_rank, checkpoint("llama"), Path(folder)))
    [(ends, num_lost_by_leader), (_, num_lost)] = ranks
    assert len(ends) == NUM_ROUNDS * NUM_ANSWERS
    refusals = [end for end in ends if end.startswith("the grammar is refused: ")]
    assert len(refusals) > NUM_ROUNDS
    assert num_lost_by_leader == 0
    assert num_lost > 0
