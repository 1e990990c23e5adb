"""The methods of an engine that the scheduler calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minisgl.core import BatchPlan, IntArray
from minisgl.engine import EngineLimits, LaunchedStep, PreparedStep, SampledStep


class Executor(Protocol):
    """Runs plans: the `Engine`, or a fake one in tests. It starts no processes."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def grammar_masks(self) -> IntArray:
        """Where the masks of a step are put before it is sampled."""

    def unpadded_prompt_sizes(self, num_decodes: int) -> Sequence[int]:
        """Numbers of prompt tokens that need no padding beside `num_decodes` decodes, ascending."""

    def prepare(self, plan: BatchPlan) -> PreparedStep:
        """Do the host work that is possible before the previous step is sampled.

        Raises:
            StepOutOfMemory: the device's memory is full.
        """

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Start computing logits, after the previous step is sampled.

        Raises:
            StepOutOfMemory: the device's memory is full. Some of the plan's writes may be done, and
                the KV of some of its slices may be written. The step can be planned again with the
                same writes.
        """

    def sample(self, launched: LaunchedStep) -> SampledStep:
        """Start choosing tokens. The steps after this one find them in the token pool."""
