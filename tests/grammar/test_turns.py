"""Turns are fair, whoever comes: neither first nor long ones starve, or wait for many others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.grammar.turns import Turn, Turns

FIRST_S = 1.0  # the longest first turn
LONG_S = 5.0  # the longest long turn
ROUNDING_S = 1e-6


@dataclass(frozen=True)
class Comer:
    """Somebody who comes.

    Attributes:
        pause_s: after the one before has come.
        first_s: what the first turn takes, of FIRST_S.
        long_s: what a long turn takes; None if none is needed.
        patience_s: until it leaves, if it still waits; None is for ever.
    """

    pause_s: float
    first_s: float
    long_s: float | None
    patience_s: float | None = None


COMERS = st.lists(
    st.builds(
        Comer,
        pause_s=st.just(0.0) | st.floats(0, 2 * FIRST_S) | st.floats(0, 2 * LONG_S),
        first_s=st.just(FIRST_S) | st.floats(0, FIRST_S),
        long_s=st.none() | st.just(LONG_S) | st.floats(0, LONG_S),
        patience_s=st.none() | st.floats(0, 5 * LONG_S),
    ),
    max_size=60,
)
SHORT = Comer(0, FIRST_S, None)
BOMB = Comer(0, FIRST_S, LONG_S)
EXAMPLES = {
    "short ones come all the time": [BOMB] + [replace(SHORT, pause_s=0.3)] * 60,
    "a short one comes behind many bombs": [BOMB] * 40 + [SHORT],
    "bombs come one after the other": [replace(BOMB, pause_s=FIRST_S)] * 40,
    "short ones alone, then bombs, then a short one": [
        *([SHORT] * 40),
        *([BOMB] * 20),
        replace(SHORT, pause_s=61.5),
    ],
    "bombs alone, then short ones": [*([BOMB] * 20), replace(SHORT, pause_s=100), *([SHORT] * 60)],
    "long turns are shorter than first ones": [*([Comer(0, 0, 0.1)] * 30), *([SHORT] * 60)],
}


class Lead:
    """By how much one side's turns have taken more than the other's, while it did not rest.

    Attributes:
        most_s: in any span of time.
    """

    def __init__(self) -> None:
        self.most_s = 0.0
        self._now_s = 0.0
        self._least_s = 0.0

    def add(self, seconds: float) -> None:
        self._now_s += seconds
        self._least_s = min(self._least_s, self._now_s)
        self.most_s = max(self.most_s, self._now_s - self._least_s)

    def begin(self) -> None:
        self._now_s = 0.0
        self._least_s = 0.0


class Simulation:
    """Turns of some comers, in a time of their own. Checks the bounds that `Turns` promises."""

    def __init__(self, comers: list[Comer]) -> None:
        self.turns: Turns[int] = Turns()
        self.now_s = 0.0
        self.comers = comers
        self.arrivals_s = [0.0] * len(comers)
        arrival_s = 0.0
        for number, comer in enumerate(comers):
            arrival_s += comer.pause_s
            self.arrivals_s[number] = arrival_s
        self.num_come = 0
        self.due_s: dict[int, float] = {}  # when a turn must have begun, of those who wait
        self.waiting_long: list[int] = []
        self.waiting_first: list[int] = []
        self.lead_of_first = Lead()  # while somebody waits for a long turn
        self.lead_of_long = Lead()  # while somebody waits for a first turn
        self.served: list[int] = []
        self.left: list[int] = []

    def run(self) -> None:
        while self.num_come < len(self.comers) or len(self.turns):
            turn = self.turns.take()
            if turn is None:
                self.pass_time(self.arrivals_s[self.num_come])
            else:
                self.do(turn)
        assert sorted(self.served + self.left) == list(range(len(self.comers)))

    def do(self, turn: Turn[int]) -> None:
        assert self.now_s <= self.due_s.pop(turn.who) + ROUNDING_S
        waiting = self.waiting_long if turn.is_long else self.waiting_first
        assert turn.who == waiting.pop(0)
        comer = self.comers[turn.who]
        long_s = comer.long_s
        turn_s = comer.first_s
        if turn.is_long:
            assert long_s is not None
            turn_s = long_s
        self.pass_time(self.now_s + turn_s)
        self.turns.end(turn, turn_s)
        self.share(turn, turn_s)
        if turn.is_long or long_s is None:
            self.served.append(turn.who)
            return
        self.turns.add_long(turn.who)
        self.due_s[turn.who] = self.now_s + (2 * len(self.waiting_long) + 1) * LONG_S + FIRST_S
        self.waiting_long.append(turn.who)

    def share(self, turn: Turn[int], turn_s: float) -> None:
        more_of_first_s = -turn_s if turn.is_long else turn_s
        if self.waiting_long:
            self.lead_of_first.add(more_of_first_s)
        else:
            self.lead_of_first.begin()
        if self.waiting_first:
            self.lead_of_long.add(-more_of_first_s)
        else:
            self.lead_of_long.begin()
        for lead in (self.lead_of_first, self.lead_of_long):
            assert lead.most_s <= LONG_S + FIRST_S + ROUNDING_S

    def pass_time(self, until_s: float) -> None:
        """Whoever comes until then waits, and who has no patience leaves."""
        while self.num_come < len(self.comers) and self.arrivals_s[self.num_come] <= until_s:
            number = self.num_come
            self.num_come += 1
            self.turns.add(number)
            wait_s = 2 * (len(self.waiting_first) + 1) * FIRST_S + LONG_S
            self.due_s[number] = self.arrivals_s[number] + wait_s
            self.waiting_first.append(number)
        self.now_s = until_s
        for number in [*self.waiting_first, *self.waiting_long]:
            patience_s = self.comers[number].patience_s
            if patience_s is not None and self.arrivals_s[number] + patience_s <= until_s:
                self.leave(number)

    def leave(self, number: int) -> None:
        assert self.turns.discard(number)
        assert not self.turns.discard(number)
        waiting = self.waiting_first if number in self.waiting_first else self.waiting_long
        waiting.remove(number)
        del self.due_s[number]
        self.left.append(number)


@given(comers=COMERS)
def test_whatever_comes_each_turn_begins_within_its_bound(comers: list[Comer]) -> None:
    Simulation(comers).run()


@pytest.mark.parametrize("comers", EXAMPLES.values(), ids=EXAMPLES)
def test_each_turn_begins_within_its_bound_where(comers: list[Comer]) -> None:
    Simulation(comers).run()
