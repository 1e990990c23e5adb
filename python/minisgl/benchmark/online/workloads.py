"""Workloads as schedules of requests: which prompt, how many tokens, when. Knows no server.

Lengths and arrivals are the same in each run. Tokens depend on the seed and the number of a run, so
that prefixes cached in an earlier run do not help.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minisgl.benchmark.online.traces import TRACE_BLOCK, Arrival

STREAMS = "streams"
LONG_PROMPTS = "long prompts"


@dataclass(frozen=True, slots=True)
class Block:
    """A run of prompt tokens. Blocks of one key begin with the same tokens."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload.

    Attributes:
        start_s: when to send it, from the start of the load; the earliest time in a closed loop.
        group: requests of one group are reported together.
        num_read: chunks with tokens after which the client hangs up; None if it never does.
    """

    prompt: tuple[Block, ...]
    num_output: int
    start_s: float = 0.0
    group: str = "requests"
    num_read: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their start.

    Attributes:
        concurrency: how many may be open at once; None for as many as arrive.
        level: the offered rate or concurrency, where several are compared.
        level_name: its unit, for the axis of a plot.
    """

    name: str
    requests: tuple[PlannedRequest, ...]
    concurrency: int | None = None
    level: float | None = None
    level_name: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of prompts and answers, and how much prompts share.

    Attributes:
        num_input, num_output: (least, most) tokens; lengths are uniform between them.
        num_shared: tokens that a prompt has in common with the others of its set, beside its own.
        num_sets: how many such sets there are.
        hang_up: the fraction of the clients that hang up, anywhere in the answer.
    """

    num_input: tuple[int, int]
    num_output: tuple[int, int]
    num_shared: int = 0
    num_sets: int = 1
    hang_up: float = 0.0

    def requests(self, starts_s: Sequence[float]) -> Iterator[PlannedRequest]:
        """Make a request for each start."""
        lengths = random.Random(0)
        ends = random.Random(2)
        for i, start_s in enumerate(starts_s):
            shared = Block(i % self.num_sets, self.num_shared)
            own = Block(self.num_sets + i, lengths.randint(*self.num_input))
            prompt = (shared, own) if self.num_shared else (own,)
            num_output = lengths.randint(*self.num_output)
            hangs_up = ends.random() < self.hang_up
            num_read = ends.randint(1, num_output) if hangs_up else None
            yield PlannedRequest(prompt, num_output, start_s, num_read=num_read)


def closed_loop(name: str, shape: Shape, num_requests: int, concurrency: int) -> Workload:
    """A new request as soon as one has ended; w6 is one of these."""
    requests = tuple(shape.requests([0.0] * num_requests))
    return Workload(name, requests, concurrency, concurrency, "requests at once")


def poisson(name: str, shape: Shape, num_requests: int, rate: float) -> Workload:
    """Independent arrivals, `rate` of them per second on average."""
    gaps = random.Random(1)
    starts_s = itertools.accumulate(gaps.expovariate(rate) for _ in range(num_requests))
    requests = tuple(shape.requests(list(starts_s)))
    return Workload(name, requests, level=rate, level_name="requests a second")


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Streams, and long prompts that arrive among them; w7 by default.

    Attributes:
        long_start_s: when the first long prompt arrives.
        long_every_s: the time from one long prompt to the next.
    """

    num_streams: int = 64
    stream_input: int = 512
    stream_output: int = 1500
    num_long: int = 8
    long_input: int = 16_000
    long_output: int = 16
    long_start_s: float = 5.0
    long_every_s: float = 1.0


def mixed(name: str, shape: MixedShape) -> Workload:
    streams = [
        PlannedRequest((Block(i, shape.stream_input),), shape.stream_output, group=STREAMS)
        for i in range(shape.num_streams)
    ]
    long_prompts = [
        PlannedRequest(
            (Block(shape.num_streams + i, shape.long_input),),
            shape.long_output,
            shape.long_start_s + i * shape.long_every_s,
            LONG_PROMPTS,
        )
        for i in range(shape.num_long)
    ]
    return Workload(name, (*streams, *long_prompts))


@dataclass(frozen=True, slots=True)
class Replay:
    """Which part of a trace is replayed, and how fast.

    Attributes:
        speed: how many seconds of the trace pass in one second.
        max_requests: of the trace's first requests.
        duration_s: requests that would arrive later, in seconds of the replay, are left out.
        max_input: longer prompts are left out.
    """

    speed: float = 1.0
    max_requests: int | None = None
    duration_s: float = float("inf")
    max_input: int = 2**62


def replay(name: str, arrivals: Sequence[Arrival], part: Replay) -> Workload:
    """The requests of a trace as they came; w5."""
    fresh = itertools.count(1 + max((max(each.blocks, default=0) for each in arrivals), default=0))
    requests = []
    for arrival in arrivals[: part.max_requests]:
        start_s = (arrival.at_s - arrivals[0].at_s) / part.speed
        if start_s <= part.duration_s and arrival.num_input <= part.max_input:
            prompt = _cut(arrival.blocks, arrival.num_input)
            num_rest = arrival.num_input - sum(block.num_tokens for block in prompt)
            if num_rest:  # of a trace with fewer hashes than tokens, or without any
                prompt = (*prompt, Block(next(fresh), num_rest))
            requests.append(PlannedRequest(prompt, max(1, arrival.num_output), start_s))
    return Workload(name, tuple(requests))


def _cut(keys: Sequence[int], num_tokens: int) -> tuple[Block, ...]:
    """A block for each key. The last one is shorter where `num_tokens` end within it."""
    rests = (num_tokens - i * TRACE_BLOCK for i in range(len(keys)))
    return tuple(Block(key, min(TRACE_BLOCK, rest)) for key, rest in zip(keys, rests, strict=True))
