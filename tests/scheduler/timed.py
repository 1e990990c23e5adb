"""A scheduler over an executor that computes nothing and takes a known time, by a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.core import BatchPlan
from minisgl.engine import EngineLimits
from minisgl.message import (
    DetokenizeMsg,
    EngineStats,
    SchedulerMsg,
    StepCostsMsg,
    UserMsg,
    pack_ids,
)
from minisgl.scheduler import Scheduler
from minisgl.scheduler.pacing.costs import StepCosts, StepWork
from tests.scheduler.harness import exactly

LIMITS = EngineLimits(
    page_size=64,
    max_seq_len=20_000,
    num_pages=20_000,
    num_rows=256,
    vocab_size=32_000,
    eos_ids=frozenset({0}),
    kv_bytes=0,
)
TOKEN = 7


@dataclass
class VirtualClock:
    """Seconds that pass when somebody waits."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class TimedStep:
    """A step, prepared, launched or sampled; its tokens are there at a known time."""

    plan: BatchPlan
    clock: VirtualClock
    ready_at: float = 0.0

    def wait(self) -> list[int]:
        self.clock.now = max(self.clock.now, self.ready_at)
        return [TOKEN for _ in self.plan.sampling_slices]

    def logprobs(self) -> dict[int, object]:
        return {}

    prompt_logprobs = logprobs
    embeddings = logprobs


class TimedExecutor:
    """A device that takes as long for a step as the costs say, and some noise.

    Attributes:
        sizes: of captured steps; a smaller step takes as long as the next of them.
    """

    limits = LIMITS

    def __init__(self, clock: VirtualClock, costs: StepCosts, noise: float) -> None:
        self.grammar_masks = np.empty((LIMITS.num_rows, 1), dtype=np.int32)
        self.costs = costs
        self.num_computed = 0
        self.sizes: list[int] = []
        self._clock = clock
        self._noise = noise
        self._random = Random(0)
        self._free_at = 0.0

    def unpadded_prompt_sizes(self, num_decodes: int) -> list[int]:
        return self.sizes

    def prepare(self, plan: BatchPlan) -> TimedStep:
        return TimedStep(plan, self._clock)

    def launch(self, prepared: TimedStep) -> TimedStep:
        work = StepWork.of(prepared.plan.slices)
        self.num_computed += work.num_tokens
        fitting = [size for size in self.sizes if size >= work.num_tokens > 0]
        work = replace(work, num_tokens=min(fitting, default=work.num_tokens))
        seconds = self.costs.seconds(work) * (1 + self._noise * self._random.random())
        prepared.ready_at = max(self._clock.now, self._free_at) + seconds
        self._free_at = prepared.ready_at
        return prepared

    def sample(self, launched: TimedStep) -> TimedStep:
        return launched


@dataclass
class TimedRequest:
    """When a request came, and when each of its tokens did."""

    came_at: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.came_at

    def gaps(self, since: float, until: float) -> list[float]:
        times = [moment for moment in self.token_times if since <= moment <= until]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


class TimedHost:
    """A scheduler to which requests come at given times.

    Attributes:
        costs: all that were posted.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        noise: float = 0.1,
        sizes: list[int] | None = None,
        **options: object,
    ) -> None:
        self.clock = VirtualClock()
        self.executor = TimedExecutor(self.clock, costs, noise)
        self.requests: list[TimedRequest] = []
        self.stats: list[EngineStats] = []
        self.costs: list[StepCosts] = []
        self._coming: list[tuple[float, int, UserMsg]] = []
        self._posted: list[SchedulerMsg] = []
        self._random = Random(1)
        self.executor.sizes = sizes or []
        config = SchedulerConfig(
            **{"overlap": True, "seed": 0, "max_prefill_length": 8192, "cache": "naive", **options}
        )
        self.scheduler = Scheduler(config, self.executor, self, self, clock=self.clock)

    def submit(
        self, came_at: float, num_prompt: int, num_answer: int, *, after: Sequence[int] = ()
    ) -> TimedRequest:
        """Let a request come at a time that is not over.

        Args:
            num_prompt: random tokens at the end of its prompt.
            after: the tokens before them.
        """
        request = TimedRequest(came_at)
        uid = len(self.requests)
        self.requests.append(request)
        ids = pack_ids([*after, *self._random.choices(range(32_000), k=num_prompt)])
        heapq.heappush(self._coming, (came_at, uid, UserMsg(uid, ids, exactly(num_answer))))
        return request

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:
        if block and not self._posted:
            self.clock.now = max(self.clock.now, self._coming[0][0])
        msgs = self._posted
        self._posted = []
        while self._coming and self._coming[0][0] <= self.clock.now:
            msgs.append(heapq.heappop(self._coming)[-1])
        return msgs

    def post(self, msg: SchedulerMsg) -> None:
        assert isinstance(msg, StepCostsMsg)
        self.costs.append(StepCosts(*msg.seconds))
        self._posted.append(msg)

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:
        self.stats += [stats] if stats else []
        for msg in msgs:
            self.requests[msg.uid].token_times += [self.clock.now] * len(msg.tokens)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until a condition holds, or all answers are there."""
        while (self._coming or not self.scheduler.is_idle) and not until():
            self.scheduler.step()


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]
