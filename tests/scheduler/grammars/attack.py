"""Sends grammars whose automata grow without end, and says how much memory that has taken.

Run in a process of its own: `python -m tests.scheduler.grammars.attack OPTIONS`, with the fields of
`Attack` as JSON. The answers of a round follow all grammars at once.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from minisgl.core import Grammar, Req, ReqSlice, SamplingParams
from minisgl.grammar import GrammarCompiler, GrammarModel
from minisgl.message import ForgetGrammarMsg, SchedulerMsg
from minisgl.scheduler.grammars.budget import GrammarBudget
from minisgl.scheduler.grammars.matchers import GrammarMatchers
from minisgl.utils.env import env_with_sys_path

_ANSWER_TOKENS = 60


class Attack(msgspec.Struct, frozen=True):
    """An attack on a tokenizer; `budget` None is the default one."""

    folder: str
    vocab_size: int
    eos_id: int
    for_gpu: bool
    num_grammars: int
    num_rounds: int
    budget: int | None = None


class Damage(msgspec.Struct, frozen=True):
    """What an attack has done.

    Attributes:
        num_bytes: by which resident memory had grown, at most.
        num_ended: answers that ended because of the budget.
        num_refused: answers that ended because their automaton had too many states.
    """

    num_bytes: int
    num_ended: int
    num_refused: int


def run_attack(attack: Attack) -> Damage:
    """Attack in a process of its own."""
    command = [sys.executable, "-m", __name__, msgspec.json.encode(attack).decode()]
    result = subprocess.run(
        command, env=env_with_sys_path(), stdout=subprocess.PIPE, check=True, timeout=120
    )
    return msgspec.json.decode(result.stdout, type=Damage)


class _Attacker:
    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        model = GrammarModel(attack.folder, attack.vocab_size, [attack.eos_id])
        self._compiler = GrammarCompiler(model)
        shape_XW = (attack.num_grammars, (attack.vocab_size + 31) // 32)
        self._masks_XW = np.zeros(shape_XW, dtype=np.int32)
        self._posted: list[SchedulerMsg] = []
        self._matchers = GrammarMatchers(
            self._masks_XW, self._posted.append, for_gpu=attack.for_gpu
        )
        if attack.budget is not None:
            self._matchers._budget = GrammarBudget(self._matchers.known, attack.budget)
        self._draw = random.Random(0)
        self._num_ended = 0
        self._num_refused = 0

    def run(self) -> Damage:
        warm_up = Grammar("regex", "(a|b)*c")
        self._answer([warm_up])
        at_first = _resident_bytes()
        at_most = 0
        grammars = [
            Grammar("regex", f"(a|b)*a(a|b){{{24 + number}}}c")
            for number in range(self._attack.num_grammars)
        ]
        for _ in range(self._attack.num_rounds):
            self._answer(grammars)
            at_most = max(at_most, _resident_bytes() - at_first)
        return Damage(at_most, self._num_ended, self._num_refused)

    def _answer(self, grammars: list[Grammar]) -> None:
        reqs = {uid: self._open(uid, grammar) for uid, grammar in enumerate(grammars)}
        for _ in range(_ANSWER_TOKENS):
            slices = [ReqSlice(req, 0, 1, samples=True) for req in reqs.values()]
            masks = self._matchers.start_masks(slices)
            if masks is not None:
                masks.wait()
            for index, uid in enumerate(list(reqs)):
                if not self._accept(uid, index):
                    del reqs[uid]
                    self._matchers.close(uid)
            self._matchers.stay_in_budget()
            for msg in self._posted:
                assert isinstance(msg, ForgetGrammarMsg)
                self._matchers.known.forget(msg.grammar)
                for uid in msg.uids:
                    del reqs[uid]
                    self._matchers.close(uid)
                    self._num_ended += 1
            self._posted.clear()
        for uid in reqs:
            self._matchers.close(uid)

    def _open(self, uid: int, grammar: Grammar) -> Req:
        if not self._matchers.knows(grammar):
            self._matchers.known.add(grammar, [self._compiler.compile(grammar)], 2**18)
        self._matchers.open(uid, grammar)
        return Req(uid, np.zeros(1, dtype=np.int32), SamplingParams(grammar=grammar), 2, 0)

    def _accept(self, uid: int, index: int) -> bool:
        """Sample what a mask allows. Returns whether the answer goes on."""
        bits = np.unpackbits(self._masks_XW[index].view(np.uint8), bitorder="little")
        state = self._matchers.accept(uid, [int(self._draw.choice(np.flatnonzero(bits)))])
        if state.error is not None:
            self._matchers.forget_grammar_of(uid)
            self._num_refused += 1
        return state.error is None and not state.is_complete


def _resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * 4096


if __name__ == "__main__":
    damage = _Attacker(msgspec.json.decode(sys.argv[1], type=Attack)).run()
    print(msgspec.json.encode(damage).decode())
