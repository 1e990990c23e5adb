"""How many prompt tokens a step computes beside running requests: a budget in time.

Running requests get a token a step, so a step's time is the gap in their streams. It is bounded by
`--target-itl-ms`. How many tokens fit comes from `StepCosts`, which rank 0 measures and sends to
all ranks. Everything else here is counted, so that all ranks find the same number.

Knows no clock. Next to read: `costs.py`, then `watch.py`, which measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from minisgl.core import ReqSlice
from minisgl.scheduler.pacing.costs import StepCosts, StepWork
from minisgl.scheduler.prefill import FirstPrompt

# The bound doubles each time that the first prompt has let this part of its length pass, ...
_DOUBLING = 0.7
# ... so many times at most.
_MAX_DOUBLINGS = 6.0
# So many bounded steps count as length of any prompt: a short one may wait for some steps, too.
_PATIENT_STEPS = 24
# Of several steps without padding running requests get more tokens than of a longer one, which the
# host launches operation by operation. If prompts advance at this part of their speed at least, a
# step has no more tokens than the largest size without padding.
_NEARLY_AS_FAST = 0.75
# A step is as small as a size without padding if that is this part of it at least.
_MUCH_OF_A_STEP = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """Settings of budgets for one kind of device.

    Attributes:
        min_tokens: of prompts in any step, so that they advance. On a GPU fewer are not faster. On
            a CPU each takes time; late in a long prompt, a tenth of a decode step. But a single one
            would count as a decode, and the costs of steps with prompts would not be measured.
        auto_factor: without `--target-itl-ms`, a step may take this many times as long as it would
            without prompts.
        auto_ms: without `--target-itl-ms`, the smallest bound.
    """

    min_tokens: int
    auto_factor: float
    auto_ms: float


# A GPU computes a step of few tokens hardly faster than one of a thousand; 20 tokens a second are
# more than a person reads.
GPU_PACE = Pace(min_tokens=64, auto_factor=2.0, auto_ms=57.0)
CPU_PACE = Pace(min_tokens=4, auto_factor=1.5, auto_ms=10.0)


class StepBudget(msgspec.Struct, frozen=True):
    """The bounds of the prompts in one step.

    Attributes:
        num_tokens: of prompts; at least 1.
        bound_ms: how long the step may take; 0 if nothing bounds it.
    """

    num_tokens: int
    bound_ms: float = 0.0


class StepPacer:
    """Finds the budget of each step. Equal on all ranks.

    Args:
        max_tokens: of a step in which no running request waits for a token.
        target_itl_ms: the bound; None chooses one, 0 is no bound.
        pace: of the device.
        unpadded_prompt_sizes: of the executor.

    Attributes:
        latest_bounded: the latest budget of a step whose time was bounded.
    """

    def __init__(
        self,
        max_tokens: int,
        target_itl_ms: float | None,
        pace: Pace,
        unpadded_prompt_sizes: Callable[[int], Sequence[int]],
    ) -> None:
        self.costs = StepCosts()
        self._max_tokens = max_tokens
        self._min_tokens = min(pace.min_tokens, max_tokens)
        self._target_itl_ms = target_itl_ms
        self._pace = pace
        self._unpadded_prompt_sizes = unpadded_prompt_sizes
        self.latest_bounded = StepBudget(max_tokens)

    def budget(self, running: list[ReqSlice], first: FirstPrompt | None) -> StepBudget:
        """The budget of a step.

        Args:
            running: what the step computes of running requests.
            first: the first prompt by arrival, waiting or partly computed; None if there is none.
        """
        if self._target_itl_ms == 0 or first is None or not running:
            return StepBudget(self._max_tokens)
        work = StepWork.of(running)
        without_prompts = self.costs.seconds(work)
        bound = self._bound(without_prompts)
        fixed = without_prompts if work.num_tokens else without_prompts + self.costs.mixed
        num_bounded = self._num_tokens(bound - fixed, first)
        bound *= _relaxation(first, num_bounded)
        num_tokens = self._num_tokens(bound - fixed, first)
        sizes = self._unpadded_sizes(running)
        if sizes:
            num_tokens = self._without_excess(num_tokens, sizes[-1], fixed, first)
            num_tokens = _unpadded_tokens(num_tokens, sizes)
        self.latest_bounded = StepBudget(num_tokens, 1e3 * bound)
        return self.latest_bounded

    def _bound(self, without_prompts: float) -> float:
        """Seconds that a step may take as long as prompts do not wait too long."""
        if self._target_itl_ms is not None:
            return self._target_itl_ms / 1e3
        return max(self._pace.auto_ms / 1e3, self._pace.auto_factor * without_prompts)

    def _unpadded_sizes(self, running: list[ReqSlice]) -> list[int]:
        """Of prompts beside them. Slices of several tokens take tokens of a size as prompts do."""
        longer = [len(req_slice) for req_slice in running if len(req_slice) > 1]
        sizes = self._unpadded_prompt_sizes(len(running) - len(longer))
        return [size - sum(longer) for size in sizes if size > sum(longer)]

    def _without_excess(
        self, num_tokens: int, largest: int, fixed: float, first: FirstPrompt
    ) -> int:
        """No more tokens than the largest number without padding, if that is nearly as fast.

        Args:
            num_tokens: that fit the step.
            fixed: seconds of the step without these tokens.
        """
        size = min(num_tokens, largest)
        seconds = fixed + self.costs.prompt_seconds(size, first.position)
        seconds_of_all = fixed + self.costs.prompt_seconds(num_tokens, first.position)
        is_nearly_as_fast = size * seconds_of_all >= _NEARLY_AS_FAST * num_tokens * seconds
        return size if is_nearly_as_fast else num_tokens

    def _num_tokens(self, seconds: float, first: FirstPrompt) -> int:
        """Tokens within the options that take so long, at the position of the first prompt."""
        num_tokens = self.costs.num_tokens_within(seconds, first.position)
        return int(min(max(num_tokens, self._min_tokens), self._max_tokens))


def _unpadded_tokens(num_tokens: int, sizes: Sequence[int]) -> int:
    """The largest size without padding that fits; all tokens if none of half as much does."""
    fitting = [size for size in sizes if _MUCH_OF_A_STEP * num_tokens <= size <= num_tokens]
    return fitting[-1] if fitting else num_tokens


def _relaxation(first: FirstPrompt, num_bounded: int) -> float:
    """By which factor the bound gives way, so that prompts do not wait without end.

    Args:
        num_bounded: tokens of a step under the bound.
    """
    lateness = first.num_passed / (first.num_tokens + _PATIENT_STEPS * num_bounded)
    return float(2.0 ** min(lateness / _DOUBLING, _MAX_DOUBLINGS))
