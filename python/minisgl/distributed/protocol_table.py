"""The protocol for a sum, by its size: the fastest of a measurement at the start.

A sum takes the protocol that was fastest for the next larger measured size. Every rank gets rank
0's times, so all choose alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from minisgl.kernel import Protocol

# None stands for NCCL.
Route = Protocol | None


@dataclass(frozen=True, slots=True)
class ProtocolTable:
    """A route for each size.

    Attributes:
        max_bytes: ascending; the largest sum that the route of the same index takes.
        routes: as many. Larger sums go to NCCL.
    """

    max_bytes: tuple[int, ...]
    routes: tuple[Route, ...]

    @classmethod
    def of_fastest(
        cls, sizes: Sequence[int], seconds: Sequence[Sequence[float]], routes: Sequence[Route]
    ) -> ProtocolTable:
        """Choose the fastest route of each size.

        Args:
            sizes: in bytes, ascending.
            seconds: for each size, those of each route; infinite where it takes no such sum.
        """
        fastest = []
        for each in seconds:
            least = min(each)
            fastest.append(routes[each.index(least)] if math.isfinite(least) else None)
        return cls(tuple(sizes), tuple(fastest))

    def route(self, num_bytes: int) -> Route:
        """The route of a sum."""
        index = bisect_left(self.max_bytes, num_bytes)
        return self.routes[index] if index < len(self.routes) else None

    @property
    def uses_peer_memory(self) -> bool:
        """Whether any size has another route than NCCL."""
        return any(route is not None for route in self.routes)

    def __str__(self) -> str:
        pairs = zip(self.max_bytes, self.routes, strict=True)
        parts = []
        for route, group in groupby(pairs, key=lambda pair: pair[1]):
            *_, (most, _) = group
            parts.append(f"{_name(route)} up to {most >> 10} KiB")
        return ", ".join([*parts, "NCCL beyond"])


def _name(route: Route) -> str:
    return "NCCL" if route is None else route.name.lower()


def seconds_a_call(call: Callable[[], object], num_calls: int = 20, num_replays: int = 10) -> float:
    """Measure a call on the GPU in a CUDA graph of `num_calls`, by the fastest of its replays.

    A call of a collective waits for that of the other ranks, so all have to measure it. Where the
    host of another rank is late, a replay includes the wait for it. At a start, when kernels are
    compiled beside it, the wait can be most of the time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()  # what is loaded or allocated once is not to be captured
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(num_calls):
            call()
        graph.capture_end()
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
    marks[-1].synchronize()
    milliseconds: float = min(begin.elapsed_time(end) for begin, end in pairwise(marks))
    return milliseconds / 1e3 / num_calls
