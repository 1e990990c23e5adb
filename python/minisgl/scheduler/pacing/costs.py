"""How long a step takes: a linear model of what it computes, fitted while serving.

    seconds = step + mixed + token * T + attended * A + decode * R + context * C

The coefficients are those of `StepCosts`; T, A, R and C are the numbers of a `StepWork`. `mixed`
counts if there are tokens of prompts. No coefficient is negative, so more work is never expected to
take less time.

Knows no clock and no scheduler: it gets work and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.core import ReqSlice

# Typical amounts of work, in the order of the coefficients, which have one magnitude for these.
_TYPICAL = np.array([4.0, 8.0, 512.0, 512.0 * 4096, 16.0, 16.0 * 1024])
# Tokens and decodes first: to these are ascribed the first steps, which do not tell effects apart.
_COORDINATES = (2, 4, 0, 5, 3, 1)
# What a step counts after the next one of its kind: about 30 steps are remembered.
_KEPT = 0.97
# How strongly a coefficient is held to its former value (ridge regression): in proportion to what
# the remembered steps tell of it, and for one of which they tell nothing.
_INERTIA = 1e-4
_LEAST_INERTIA = 1e-6
_NUM_SWEEPS = 4
# A step that takes longer than this many times what was expected has a smaller weight than others.
_MAX_ERROR = 3.0
_SHORTEST_S = 1e-6
_DIAGONAL = np.diag_indices(len(_TYPICAL))


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, in numbers.

    Attributes:
        num_tokens: in slices of several tokens.
        num_attended: positions that these tokens attend to, added up.
        num_decodes: slices of one token.
        num_context: positions that the decodes attend to, added up.
    """

    num_tokens: int
    num_attended: float
    num_decodes: int
    num_context: int

    @classmethod
    def of(cls, slices: Sequence[ReqSlice]) -> StepWork:
        num_tokens = 0
        num_attended = 0.0
        num_decodes = 0
        num_context = 0
        for req_slice in slices:
            length = req_slice.end - req_slice.start
            if length == 1:
                num_decodes += 1
                num_context += req_slice.end
            else:
                num_tokens += length
                num_attended += length * (req_slice.start + req_slice.end) / 2
        return cls(num_tokens, num_attended, num_decodes, num_context)

    @property
    def amounts(self) -> tuple[int, float, int, int]:
        """In the order of their coefficients."""
        return self.num_tokens, self.num_attended, self.num_decodes, self.num_context


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds, by what they are spent on: the coefficients of the model. None is negative."""

    step: float = 0.0
    mixed: float = 0.0
    token: float = 0.0
    attended: float = 0.0
    decode: float = 0.0
    context: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """How long a step is expected to take."""
        return (
            self.step
            + (self.mixed if work.num_tokens else 0.0)
            + self.token * work.num_tokens
            + self.attended * work.num_attended
            + self.decode * work.num_decodes
            + self.context * work.num_context
        )

    def prompt_seconds(self, num_tokens: int, start: int) -> float:
        """How long tokens of a prompt take, from position start on."""
        return num_tokens * (self.token + self.attended * (start + num_tokens / 2))

    def num_tokens_within(self, seconds: float, start: int) -> float:
        """Tokens of a prompt, from position start on, that take so long; may be infinite."""
        if seconds <= 0:
            return 0.0
        slope = self.token + self.attended * start
        root = slope + math.sqrt(slope * slope + 2 * self.attended * seconds)
        return 2 * seconds / root if root > 0 else math.inf


class StepCostFit:
    """Fits the costs to measured steps: least squares of errors relative to the time of a step.

    So short steps count as much as long ones. A time far beyond the expected one has little weight:
    a hiccup changes little, and a machine that has become slower is noticed after some steps. Steps
    with prompts and steps without are forgotten each at their own pace, because there may be none
    of one kind for long. What the remembered steps do not tell apart stays as it was.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._scaled = [0.0] * len(_TYPICAL)
        self._gram: NDArray[Any] = np.zeros((2, len(_TYPICAL), len(_TYPICAL)))
        self._moment: NDArray[Any] = np.zeros((2, len(_TYPICAL)))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Account for a step that took so long."""
        scale = max(self.costs.seconds(work), seconds / _MAX_ERROR, _SHORTEST_S)
        has_tokens = work.num_tokens > 0
        features = np.array((1, has_tokens, *work.amounts)) / (_TYPICAL * scale)
        kind = int(has_tokens)
        self._gram[kind] *= _KEPT
        self._gram[kind] += features[:, None] * features
        self._moment[kind] *= _KEPT
        self._moment[kind] += features * (seconds / scale)
        self._solve()

    def _solve(self) -> None:
        """Go towards the best costs that are not negative, one coordinate after the other."""
        gram = self._gram[0] + self._gram[1]
        inertia = _INERTIA * (gram[_DIAGONAL] + _LEAST_INERTIA * float(gram.trace()))
        gram[_DIAGONAL] += inertia
        before = np.array(self._scaled)
        moment = (self._moment[0] + self._moment[1] + inertia * before).tolist()
        rows = gram.tolist()
        values = self._scaled
        for _ in range(_NUM_SWEEPS):
            for i in _COORDINATES:
                missing = moment[i] - sum(map(mul, rows[i], values))
                values[i] = max(0.0, values[i] + missing / rows[i][i])
        self.costs = StepCosts(*(np.array(values) / _TYPICAL).tolist())
