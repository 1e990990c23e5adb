"""Ranks that find different things of a grammar stay together: what rank 0 finds counts.

One may compile it where the other one has no memory for that. Then its matches may fail in
different steps. Answers share an automaton, which grows as it is asked for masks. A mask may take
so much work, and whoever needs a new state first pays for it. Threads of a GPU's scheduler ask in
any order.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from llguidance import LLMatcher, LLParserLimits

from minisgl.core import Grammar, IntArray, SamplingParams
from minisgl.distributed import DistributedInfo
from minisgl.engine import Engine
from minisgl.grammar import GrammarCompiler, compiler, refusal
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
from minisgl.scheduler import FollowerLink, LeaderLink, Scheduler
from minisgl.scheduler.grammars import matchers
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from tests.distributed.harness import in_processes
from tests.engine.harness import config_of

HOSTILE = Grammar("regex", "(a|b)*a(a|b){24}c")
HOSTILE_ROUNDS = [
    [
        SamplingParams(max_tokens=200, seed=seed, temperature=2.0, grammar=HOSTILE)
        for seed in range(first, first + 3)
    ]
    for first in range(0, 18, 3)
]
WORK = LLParserLimits(step_lexer_fuel=700)  # of a mask; whoever needs a state first pays for it


class Client:
    """Inbox and outbox of rank 0: sends a round when the one before is answered, then the end.

    Attributes:
        ends: finish reasons and errors by uid, which counts requests in the order of the rounds.
    """

    def __init__(self, rounds: list[list[SamplingParams]]) -> None:
        self.ends: dict[int, str] = {}
        self._rounds = rounds.copy()
        self._posted: queue.SimpleQueue[SchedulerMsg] = queue.SimpleQueue()
        self._num_sent = 0

    def receive(self, *, block: bool) -> list[SchedulerMsg]:
        if len(self.ends) == self._num_sent:
            self._ask()
        msgs = [self._posted.get()] if block else []
        while not self._posted.empty():
            msgs.append(self._posted.get())
        return msgs

    def _ask(self) -> None:
        if not self._rounds:
            self.post(ExitMsg())
            return
        for params in self._rounds.pop(0):
            self.post(UserMsg(self._num_sent, pack_ids([1, 2, 3]), params))
            self._num_sent += 1

    def post(self, msg: SchedulerMsg) -> None:
        self._posted.put(msg)

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        for msg in msgs:
            if msg.error or msg.finish:
                self.ends[msg.uid] = msg.error.message if msg.error else str(msg.finish)


def fill_backwards(matches: list[Any], masks_XW: IntArray) -> Any:
    return in_order(matches[::-1], masks_XW)


in_order = matchers._fill_each

FAILS_ON_BOTH: dict[Grammar, Exception] = {Grammar("regex", "[ab]*"): MemoryError()}
FAILS_ON_LEADER: dict[Grammar, Exception] = {
    Grammar("regex", "[bc]*"): MemoryError(),
    Grammar("regex", "[cd]*"): refusal("no tokenizer"),
}
# The second round finds out whether the ranks have remembered the same.
FAILING_ROUNDS = [
    [
        SamplingParams(max_tokens=8, grammar=grammar)
        for grammar in [*FAILS_ON_BOTH, *FAILS_ON_LEADER, Grammar("regex", pattern)]
    ]
    for pattern in ("[de]{64}", "[ef]{64}")
]


def serve(
    model: Path, folder: Path, info: DistributedInfo, rounds: list[list[SamplingParams]]
) -> dict[int, str]:
    """How answers end, as rank 0 says."""
    address = f"ipc://{folder}/queue"
    client = Client(rounds)
    link: LeaderLink | FollowerLink
    if info.leads:
        link = LeaderLink(client, [PushQueue(address, encode)])
    else:
        link = FollowerLink(PullQueue(address, decoder(LeaderMsg)))
    config = config_of(model, tp=info.size)
    engine = Engine(config, info, folder / "rendezvous")
    Scheduler(config, engine, link, client, leads=info.leads, other_ranks=link).run()
    return client.ends


def meet_limits(model: Path, folder: Path, info: DistributedInfo) -> tuple[dict[int, str], int]:
    """How answers end, and how many matches this rank loses."""
    compiler._LIMITS["regex"] = WORK
    if not info.leads:
        matchers._fill_each = fill_backwards
    with patch.object(
        GrammarMatchers, "lose_match", autospec=True, side_effect=GrammarMatchers.lose_match
    ) as lose:
        ends = serve(model, folder, info, HOSTILE_ROUNDS)
    return ends, lose.call_count


def test_ranks_stay_together_that_meet_a_grammars_limits_in_other_orders(
    checkpoint: Callable[[str], Path],
) -> None:
    with TemporaryDirectory() as folder:
        ranks = in_processes(2, partial(meet_limits, checkpoint("llama"), Path(folder)))
    [(ends, num_lost_by_leader), (_, num_lost)] = ranks
    assert len(ends) == sum(map(len, HOSTILE_ROUNDS))
    refusals = [end for end in ends.values() if end.startswith("the grammar is refused: ")]
    assert len(refusals) > len(HOSTILE_ROUNDS)
    assert num_lost_by_leader == 0
    assert num_lost > 0


def fail_to_compile(model: Path, folder: Path, info: DistributedInfo) -> dict[int, str]:
    """How answers end. Trials, in a process of their own, accept all grammars."""
    compile_grammar = GrammarCompiler.compile

    def compile_or_fail(self: GrammarCompiler, grammar: Grammar) -> LLMatcher:
        if grammar in FAILS_ON_BOTH or (grammar in FAILS_ON_LEADER and info.leads):
            raise (FAILS_ON_BOTH | FAILS_ON_LEADER)[grammar]
        return compile_grammar(self, grammar)

    with patch.object(GrammarCompiler, "compile", compile_or_fail):
        return serve(model, folder, info, FAILING_ROUNDS)


def test_of_a_grammar_that_rank_0_cannot_compile_all_ranks_say_the_same_and_go_on(
    checkpoint: Callable[[str], Path],
) -> None:
    """Whether the other rank can compile it or not."""
    with TemporaryDirectory() as folder:
        ranks = in_processes(2, partial(fail_to_compile, checkpoint("llama"), Path(folder)))
    failed = "the grammar passed its trial and cannot be compiled: MemoryError; try again later"
    errors = [failed, failed, "the grammar is refused: no tokenizer"]
    assert ranks[0] == dict(enumerate([*errors, "length", *errors, "length"]))
