"""Grammars that grow without end cannot fill a scheduler's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.core import Grammar
from minisgl.message import ForgetGrammarMsg
from minisgl.scheduler.grammars.budget import GrammarBudget
from minisgl.scheduler.grammars.known import KnownGrammar, KnownGrammars
from tests.checkpoints import EOS_ID, VOCAB_SIZE
from tests.scheduler.grammars.attack import Attack, run_attack
from tests.scheduler.grammars.test_pending import ACCEPTED, LONG, FakeMatcher, GrammarHost, guided
from tests.scheduler.harness import exactly
from tests.scheduler.test_scheduler import prompt_of

MIB = 2**20
A, B, C = (Grammar("regex", text) for text in "abc")


@pytest.mark.parametrize("for_gpu", [False, True])
def test_hostile_grammars_stay_within_their_budget(
    for_gpu: bool, checkpoint: Callable[[str], Path]
) -> None:
    """An allocator keeps some memory beside the budget, and threads are seen late.

    Without a budget this attack takes 102 to 104 MiB, with it 26 to 29.
    """
    folder = str(checkpoint("qwen2"))
    budget = 12 * MIB
    damage = run_attack(Attack(folder, VOCAB_SIZE, EOS_ID, for_gpu, 40, 40, budget))
    assert damage.num_bytes < 60 * MIB
    assert damage.num_ended


class Grammars:
    """A budget of 100 MiB, and grammars in it."""

    def __init__(self, max_grown_mib: int = 100) -> None:
        self.known = KnownGrammars()
        self.budget = GrammarBudget(self.known, 100 * MIB, max_grown_mib * MIB, MIB)
        self._opened: dict[int, KnownGrammar] = {}

    def add(self, grammar: Grammar, mib: int, *uids: int) -> None:
        """Add a grammar that has grown, and answers that follow it."""
        self.known.add(grammar, [FakeMatcher()], 0)  # type: ignore[list-item]
        self._opened |= {uid: self.known.open(grammar) for uid in uids}
        self.grow(grammar, mib)

    def grow(self, grammar: Grammar, mib: int) -> None:
        [known] = [known for known in self.known.all() if known.grammar == grammar]
        self.budget.grow(known, mib * MIB)

    def excess(self) -> list[ForgetGrammarMsg]:
        return self.budget.excess(self._opened.items())


def test_within_the_budget_nothing_goes() -> None:
    grammars = Grammars()
    grammars.add(A, 50, 1)
    grammars.add(B, 49)
    assert grammars.excess() == []


def test_grammars_that_no_answer_follows_go_first_and_the_oldest_of_them() -> None:
    grammars = Grammars()
    grammars.add(A, 30, 1)
    grammars.add(B, 30)
    grammars.add(C, 60)
    assert grammars.excess() == [ForgetGrammarMsg(B)]


def test_then_the_answers_of_the_largest_end_and_the_error_names_the_bound() -> None:
    grammars = Grammars()
    grammars.add(A, 40, 1)
    grammars.add(B, 70, 2, 3)
    [msg] = grammars.excess()
    assert (msg.grammar, msg.uids) == (B, (2, 3))
    assert "70 MiB" in msg.error
    assert "100 MiB together" in msg.error


def test_a_grammar_that_was_forgotten_counts_while_answers_follow_it() -> None:
    grammars = Grammars()
    grammars.add(A, 70, 1)
    grammars.known.forget(A)
    grammars.add(B, 40, 2)
    assert [msg.uids for msg in grammars.excess()] == [(1,)]


def test_a_grammar_that_has_grown_by_much_is_forgotten_and_its_answers_go_on() -> None:
    grammars = Grammars(max_grown_mib=50)
    grammars.add(A, 51, 1)
    assert grammars.excess() == [ForgetGrammarMsg(A)]


def test_the_answers_end_whose_grammar_takes_too_much_and_no_others() -> None:
    host = GrammarHost()
    neighbour = host.submit(prompt_of(4), exactly(LONG))
    ended = host.submit(prompt_of(5), guided(num_tokens=LONG))
    host.step()
    host.post_verdict(ACCEPTED)
    host.step(4)
    grammar = guided(num_tokens=LONG).grammar
    assert grammar is not None
    host.inbox.post(ForgetGrammarMsg(grammar, (ended, 999), "too much"))
    host.drain()
    error = host.answer(ended).error
    assert (error and error.message) == "too much"
    assert len(host.answer(neighbour).tokens) == LONG
    assert grammar not in host.matchers.known
