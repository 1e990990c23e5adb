"""Which captured graph takes a plan: kinds of graphs, their sizes, and the choice among them.

Knows nothing of tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from minisgl.core import BatchPlan, TableWrites

SLICE_SIZES = [32, 64, 128, 256, 512, 1024]
# A shared prefix of fewer tokens, or of fewer decodes, is not worth another graph.
_MIN_SHARED_TOKENS = 256
_MIN_SHARING_DECODES = 16
# The kernel that reads a shared prefix once takes this many times as long for a token that is not
# shared. Qwen3-14B on an H200, 48 decodes of 9,000 tokens of which 512 are shared: 33.9 ms a step
# with it and 24.1 without, of which 7 are not attention.
_OWN_TOKEN_COST = 1.7
# Tokens times bytes of weights. Beyond, a step takes the device longer than it takes the host to
# launch it.
_MAX_SLICE_WORK = 2 * 10**13
_MAX_CPU_DECODES = 8


class GraphKind(Enum):
    """What a graph computes.

    Attributes:
        ONE_SLICE: of any request that is alone in its step: most often a short prompt, but also a
            chunk, or an answer with forced tokens.
    """

    DECODES = "decodes"
    SHARED_PREFIX = "decodes with a shared prefix"
    ONE_SLICE = "one slice that is no decode"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The kind of a captured graph, and its size in tokens."""

    kind: GraphKind
    size: int


def find_graph_key(plan: BatchPlan, captured: dict[GraphKind, list[int]]) -> GraphKey | None:
    """The smallest captured graph that takes a plan, if there is one.

    Args:
        captured: the sizes of each kind, smallest first.
    """
    slices = plan.slices
    if all(req_slice.samples and req_slice.start + 1 == req_slice.end for req_slice in slices):
        kind = _decode_kind(plan)
        num_tokens = len(slices)
    elif len(slices) == 1 and slices[0].num_hidden_states <= 1:
        kind = GraphKind.ONE_SLICE
        num_tokens = len(slices[0])
    else:
        return None

    for size in captured[kind]:
        if size >= num_tokens:
            return GraphKey(kind, size)
    return None


def _decode_kind(plan: BatchPlan) -> GraphKind:
    if plan.num_shared_tokens < _MIN_SHARED_TOKENS or len(plan.slices) < _MIN_SHARING_DECODES:
        return GraphKind.DECODES
    return GraphKind.SHARED_PREFIX if sharing_pays(plan) else GraphKind.DECODES


def sharing_pays(plan: BatchPlan) -> bool:
    """Whether decodes that share a prefix take less time if it is read once for all of them.

    Tokens of context stand for time, since attention of decodes is bound by reading them.
    """
    num_tokens = sum([req_slice.end for req_slice in plan.slices])
    num_own = num_tokens - len(plan.slices) * plan.num_shared_tokens
    return plan.num_shared_tokens + _OWN_TOKEN_COST * num_own < num_tokens


def has_room_for_writes(key: GraphKey, writes: TableWrites) -> bool:
    """Whether a graph can do the table writes of its step: one page a request, and no tokens."""
    max_pages = 1 if key.kind is GraphKind.ONE_SLICE else key.size
    has_only_pages = len(writes.tokens) == 0 and not writes.copies
    return has_only_pages and len(writes.pages) <= max_pages


def largest_slice(max_tokens: int, weight_bytes: int) -> int:
    """The longest slice that is worth a graph.

    Args:
        max_tokens: of a request.
        weight_bytes: bytes of weights that a step reads, without experts.
    """
    return min(SLICE_SIZES[-1], max_tokens, _MAX_SLICE_WORK // weight_bytes)


def graph_sizes(max_decodes: int, max_slice: int) -> dict[GraphKind, list[int]]:
    """What a GPU captures, smallest first; every second size of decodes with a shared prefix."""
    decodes = size_ladder(max_decodes)
    every_second = {*range(16, max_decodes, 16), max_decodes}
    sharing = [size for size in decodes if size in every_second]
    return {
        GraphKind.DECODES: decodes,
        GraphKind.SHARED_PREFIX: [size for size in sharing if size >= _MIN_SHARING_DECODES],
        GraphKind.ONE_SLICE: [size for size in SLICE_SIZES if size <= max_slice],
    }


def cpu_graph_sizes(max_decodes: int) -> dict[GraphKind, list[int]]:
    """What a CPU captures: few decodes. Of more, the work takes far longer than its calls."""
    sizes: dict[GraphKind, list[int]] = {kind: [] for kind in GraphKind}
    sizes[GraphKind.DECODES] = list(range(1, min(max_decodes, _MAX_CPU_DECODES) + 1))
    return sizes


def size_ladder(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and the largest."""
    steps = itertools.chain((1, 2, 4), range(8, largest, 8))
    return [*(size for size in steps if size < largest), largest]


def some_sizes(sizes: list[int]) -> list[int]:
    """The smallest, one in the middle, and the two largest."""
    chosen = {0, len(sizes) // 2, len(sizes) - 2, len(sizes) - 1}
    return [size for i, size in enumerate(sizes) if i in chosen]
