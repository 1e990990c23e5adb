"""The scheduler's cost of a step on the host, without a model: its executor computes nothing.

    python benchmark/offline/scheduler_steps.py [--steps 200] [--out results.jsonl]

Decode steps are timed with 64, 256 and 1,024 running requests, without and with 10,000 others that
wait. The rest are steps that were slow once: many prompts in one step, requests on a long cached
prefix, prompts that are in the queue twice, and the abort of all waiting requests. Messages are
neither encoded nor sent. Times are the thread's processor time, so that other processes matter
little; the slowest step is shown beside the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.benchmark.arguments import output_file, positive
from minisgl.benchmark.perf import Figure, append_figures
from minisgl.config import SchedulerConfig
from minisgl.core import BatchPlan, IntArray, SamplingParams
from minisgl.engine import EngineLimits
from minisgl.message import (
    AbortMsg,
    DetokenizeMsg,
    EngineStats,
    SchedulerMsg,
    UserMsg,
    pack_ids,
)
from minisgl.scheduler import Scheduler
from minisgl.utils.garbage import start_serving

NUM_RUNNING = (64, 256, 1024)
NUM_QUEUED = 10_000
NUM_PREFIX = 100_000
PAGE_SIZE = 64
TOKEN = 7


@dataclass
class NoOutput:
    """The output of a step: the same token for each slice."""

    num_sampled: int

    def wait(self) -> list[int]:
        return [TOKEN] * self.num_sampled

    def logprobs(self) -> dict[int, object]:
        return {}

    prompt_logprobs = logprobs
    embeddings = logprobs


@dataclass
class NoStep:
    """A step, prepared or launched, of which only the plan is known."""

    plan: BatchPlan


class NoExecutor:
    """Takes plans and computes nothing."""

    def __init__(self, num_rows: int) -> None:
        self.limits = EngineLimits(
            page_size=PAGE_SIZE,
            max_seq_len=NUM_PREFIX + 2048,
            num_pages=2_000_000 // PAGE_SIZE + num_rows * 32,
            num_rows=num_rows,
            vocab_size=32_000,
            eos_ids=frozenset({0}),
            kv_bytes=0,
        )
        self.grammar_masks = np.empty((num_rows, 1000), dtype=np.int32)
        self.num_written = 0

    def unpadded_prompt_sizes(self, num_decodes: int) -> list[int]:  # noqa: ARG002 - no graphs
        return []

    def prepare(self, plan: BatchPlan) -> NoStep:
        self.num_written += len(plan.writes.pages) + len(plan.writes.tokens)
        return NoStep(plan)

    def launch(self, prepared: NoStep) -> NoStep:
        return prepared

    def sample(self, launched: NoStep) -> NoOutput:
        return NoOutput(len(launched.plan.sampling_slices))


@dataclass
class ListInbox:
    """Returns the messages that were put in."""

    msgs: list[SchedulerMsg] = field(default_factory=list)

    def receive(self, *, block: bool) -> Sequence[SchedulerMsg]:  # noqa: ARG002 - never waits
        msgs = self.msgs
        self.msgs = []
        return msgs

    def post(self, msg: SchedulerMsg) -> None:
        self.msgs.append(msg)


class CountingOutbox:
    """Counts the tokens that are sent."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def send(self, msgs: list[DetokenizeMsg], stats: EngineStats | None) -> None:  # noqa: ARG002
        self.num_tokens += sum(len(msg.tokens) for msg in msgs)

    def redirect(self, life: int) -> None:
        raise AssertionError(f"there is no detokenizer, and so none of life {life}")


class Bench:
    """A scheduler over an executor that computes nothing."""

    def __init__(self, num_rows: int, max_prefill_length: int = 8192) -> None:
        self.executor = NoExecutor(num_rows)
        self.inbox = ListInbox()
        self.outbox = CountingOutbox()
        config = SchedulerConfig(
            model="",
            seed=0,
            overlap=True,
            device="cpu",
            max_prefill_length=max_prefill_length,
            target_itl_ms=0,
        )
        self.scheduler = Scheduler(config, self.executor, self.inbox, self.outbox)  # type: ignore[arg-type]
        self._num_submitted = 0

    def submit(self, prompt: IntArray, max_tokens: int = 1900) -> int:
        uid = self._num_submitted
        self._num_submitted += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.inbox.msgs.append(UserMsg(uid, pack_ids(prompt.tolist()), params))
        return uid

    def step(self) -> float:
        """Milliseconds of one step on the processor; other processes count little."""
        started = time.thread_time()
        self.scheduler.step()
        return 1e3 * (time.thread_time() - started)

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.scheduler.step()

    def start(self, prompts: Sequence[IntArray]) -> None:
        """Let requests run beside those that do; all have tokens when this returns."""
        num_running = len(self.scheduler.decode) + len(prompts)
        for prompt in prompts:
            self.submit(prompt)
        self.run_until(lambda: len(self.scheduler.decode) == num_running)
        for _ in range(3):
            self.scheduler.step()


def prompts_of(num: int, length: int, prefix: IntArray | None = None) -> list[IntArray]:
    """Random prompts, after a prefix that they have in common."""
    source = np.random.default_rng(0)
    rest = source.integers(10, 32_000, (num, length), dtype=np.int32)
    return [row if prefix is None else np.concatenate([prefix, row]) for row in rest]


@dataclass(frozen=True)
class Row:
    """One line of the table: times of equal steps, or repetitions of one thing."""

    workload: str
    times_ms: list[float]
    note: str = ""

    def __str__(self) -> str:
        median = statistics.median(self.times_ms)
        return f"{self.workload:52} {median:9.3f} {max(self.times_ms):9.3f}  {self.note}"

    def figure(self) -> Figure:
        return Figure(
            engine="minisgl",
            workload=self.workload,
            model="none",
            device="cpu",
            metric="host_ms",
            values=[round(value, 4) for value in self.times_ms],
        )


def decodes(num_running: int, num_queued: int, num_steps: int) -> Row:
    """Steps of decodes; waiting requests find no free row."""
    bench = Bench(num_running)
    bench.start(prompts_of(num_running, 40))
    for prompt in prompts_of(num_queued, 40):
        bench.submit(prompt)
    bench.step()
    times_ms = [bench.step() for _ in range(num_steps)]
    return Row(f"decode, {num_running} running, {num_queued} queued", times_ms)


def decodes_after_a_shared_prefix(num_steps: int) -> Row:
    """Steps of 256 decodes whose requests have a long prefix in common."""
    bench = Bench(256)
    prefix = prompts_of(1, NUM_PREFIX)[0]
    bench.start([prefix])
    bench.start(prompts_of(255, 40, prefix))
    times_ms = [bench.step() for _ in range(num_steps)]
    return Row(f"decode, 256 running on {NUM_PREFIX} shared tokens", times_ms)


def many_short_prompts() -> Row:
    """One step that admits 1,024 prompts."""
    times_ms: list[float] = []
    for _ in range(3):
        bench = Bench(1024, max_prefill_length=100_000)
        for prompt in prompts_of(1024, 40):
            bench.submit(prompt)
        times_ms.append(bench.step())
    return Row("a step that admits 1024 prompts of 40 tokens", times_ms)


def requests_on_a_cached_prefix() -> Row:
    """One step that admits 128 requests whose prefix is cached, and held by none."""
    bench = Bench(128)
    prefix = prompts_of(1, NUM_PREFIX)[0]
    bench.submit(prefix, max_tokens=1)
    bench.run_until(lambda: bench.outbox.num_tokens == 1)
    bench.run_until(lambda: bench.scheduler.is_idle)
    for prompt in prompts_of(128, 40, prefix):
        bench.submit(prompt)
    bench.executor.num_written = 0
    times_ms = [bench.step()]
    note = f"{bench.executor.num_written} entries of tables written"
    return Row(f"a step that admits 128 requests on {NUM_PREFIX} cached tokens", times_ms, note)


def prompts_that_stand_twice() -> Row:
    """64 different prompts, each for two answers: until all of them run."""
    bench = Bench(128)
    for prompt in prompts_of(64, 512):
        bench.submit(prompt)
        bench.submit(prompt)
    times_ms: list[float] = []
    while len(bench.scheduler.decode) < 128:
        times_ms.append(bench.step())
    return Row(
        "steps that admit 64 prompts of 512 tokens, n = 2", times_ms, f"{len(times_ms)} steps"
    )


def aborts() -> Row:
    """One step that handles the aborts of all waiting requests."""
    bench = Bench(1)
    bench.start(prompts_of(1, 40))
    uids = [bench.submit(prompt) for prompt in prompts_of(NUM_QUEUED, 40)]
    bench.step()
    bench.inbox.msgs += [AbortMsg(uid) for uid in reversed(uids)]
    return Row(f"a step that aborts {NUM_QUEUED} queued requests", [bench.step()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=positive, default=200, help="decode steps of each kind")
    parser.add_argument(
        "--out", type=output_file, help="a file of JSON lines to add the figures to"
    )
    args = parser.parse_args()
    start_serving()

    rows = [
        decodes(num_running, num_queued, args.steps)
        for num_queued in (0, NUM_QUEUED)
        for num_running in NUM_RUNNING
    ]
    rows.append(decodes_after_a_shared_prefix(args.steps))
    rows += [many_short_prompts(), requests_on_a_cached_prefix(), prompts_that_stand_twice()]
    rows.append(aborts())

    print(f"{'':52} {'median ms':>9} {'max ms':>9}")
    for row in rows:
        print(row)
    if args.out:
        append_figures(args.out, [row.figure() for row in rows])


if __name__ == "__main__":
    main()
