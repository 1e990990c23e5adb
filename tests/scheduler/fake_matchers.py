"""Grammars that force what the fake executor samples anyway, so that all answers stay known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.core import Grammar, ReqSlice
from minisgl.errors import InvalidRequest
from minisgl.message import MatchState
from minisgl.scheduler.grammars.matchers import IN_PROGRESS, GrammarMatchers
from tests.scheduler.script import Script


class FakeMatchers(GrammarMatchers):
    """Follows scripts, and asserts that every token is accepted once and in order.

    Args:
        answer_of: the endless answer to a request.
    """

    def __init__(self, answer_of: Callable[[int], list[int]]) -> None:
        self._answer_of = answer_of
        self._scripts: dict[int, Script] = {}
        self._answers: dict[int, list[int]] = {}
        self._accepted: dict[int, list[int]] = {}

    def knows(self, grammar: Grammar) -> bool:
        return True

    def open(self, uid: int, grammar: Grammar) -> None:
        if grammar.text == "bad":
            raise InvalidRequest("the grammar is refused", param="grammar")
        self._scripts[uid] = Script.of(grammar)
        self._answers[uid] = self._answer_of(uid)
        self._accepted[uid] = []

    def close(self, uid: int) -> None:
        self._scripts.pop(uid, None)

    def forget_grammar_of(self, uid: int) -> None:
        """Scripts are not kept for later requests."""
        assert self._scripts[uid].is_broken

    def stay_in_budget(self) -> None:
        """Scripts take no memory."""

    @property
    def num_open(self) -> int:
        return len(self._scripts)

    def restricts_any(self, slices: Sequence[ReqSlice]) -> bool:
        return any(req_slice.req.uid in self._scripts for req_slice in slices)

    def start_masks(self, slices: Sequence[ReqSlice]) -> None:
        """Nothing is masked: the fake executor samples what the grammars allow."""
        guided = [req_slice.req.uid for req_slice in slices if req_slice.req.params.grammar]
        assert set(guided) <= self._scripts.keys(), "a match was closed before its last mask"

    def accept(self, uid: int, tokens: list[int]) -> MatchState:
        accepted = self._accepted[uid]
        accepted += tokens
        assert accepted == self._answers[uid][: len(accepted)]
        script = self._scripts[uid]
        num_left = script.num_tokens - len(accepted)
        assert num_left >= 0, "a token after a complete match"
        if num_left == 0 and script.is_broken:
            return MatchState(error="the match is broken")
        return MatchState(is_complete=True) if num_left == 0 else IN_PROGRESS

    def forced_tokens(self, uid: int) -> list[int]:
        num_output = len(self._accepted[uid])
        num_forced = self._scripts[uid].num_forced(num_output)
        return self._answers[uid][num_output : num_output + num_forced]
