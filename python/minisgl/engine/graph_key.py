"""Which captured graph takes a plan: kinds of graphs, their sizes, and the choice among them.

Knows nothing of tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from minisgl.core import BatchPlan, TableWrites

# A shared prefix of fewer tokens, or of fewer decodes, is not worth another graph.
_MIN_SHARED_TOKENS = 256
_MIN_SHARING_DECODES = 16
# The kernel that reads a shared prefix once takes this many times as long for a token that is not
# shared. Qwen3-14B on an H200, 48 decodes of 9,000 tokens of which 512 are shared: 33.9 ms a step
# with it and 24.1 without, of which 7 are not attention.
_OWN_TOKEN_COST = 1.7

# More decodes than these are captured only where the option says so.
_MAX_DECODES = 512
# Tokens of a slice that is alone in its step, ...
_LONE_SIZES = [32, 64, 128, 256, 512, 1024]
# ... and of a step with several slices, decodes included. A GPU multiplies 128 tokens at a time.
_STEP_SIZES = [*range(128, 1281, 128), 1536, 2048]
# It has up to so many prompts, beside so many decodes.
MAX_PROMPTS = 16
_DECODES_BESIDE_PROMPTS = [32, 64, 80, 128, 256, 384]
_MIN_PROMPT_TOKENS = 64
# Tokens times bytes of weights. Beyond, a step takes the device longer than it takes the host to
# launch it: Qwen3-14B on an H200, 1,500 tokens, 60 ms.
_MAX_PROMPT_WORK = 45 * 10**12

# On a CPU padding takes time: 0.25 ms a token of SmolLM2-135M, and launching it by Python 6 ms a
# step. The products of the largest of these steps are still those of a compiled kernel.
_CPU_DECODES = [*range(1, 9), 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
_CPU_DECODES_BESIDE_PROMPTS = [0, 4, 8, 16, 32]
_CPU_PROMPT_TOKENS = [8, 16, 24, 32, 48, 64]
_MAX_CPU_PROMPTS = 4


class GraphKind(Enum):
    """What a graph computes.

    Attributes:
        WITH_PROMPTS: any steps: most often prompts or chunks of them, alone or beside decodes, but
            also answers with forced tokens.
    """

    DECODES = "decodes"
    SHARED_PREFIX = "decodes with a shared prefix"
    WITH_PROMPTS = "decodes and prompts"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The kind of a captured graph, and what it has room for.

    Attributes:
        num_decodes: slices of one token.
        num_prompts: other slices.
        num_prompt_tokens: of these together.
    """

    kind: GraphKind
    num_decodes: int
    num_prompts: int = 0
    num_prompt_tokens: int = 0

    @property
    def num_slices(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens


# Of each kind, those of fewest tokens first, and of these, those of fewest decodes.
GraphKeys = dict[GraphKind, list[GraphKey]]


def find_graph_key(plan: BatchPlan, captured: GraphKeys) -> GraphKey | None:
    """The smallest captured graph that takes a plan, if there is one."""
    slices = plan.slices
    if all(req_slice.samples and req_slice.start + 1 == req_slice.end for req_slice in slices):
        kind = _decode_kind(plan)
        num_decodes = len(slices)
        num_prompts = 0
        num_prompt_tokens = 0
    elif all(req_slice.num_hidden_states == req_slice.samples for req_slice in slices):
        kind = GraphKind.WITH_PROMPTS
        # One token alone is computed like a prompt, by a graph that has no place for decodes.
        num_decodes = plan.num_decodes if len(slices) > 1 else 0
        num_prompts = len(slices) - num_decodes
        num_prompt_tokens = sum(map(len, slices[num_decodes:]))
    else:
        return None

    for key in captured[kind]:
        if (
            key.num_decodes >= num_decodes
            and key.num_prompts >= num_prompts
            and key.num_prompt_tokens >= num_prompt_tokens
        ):
            return key
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


def prompt_room(captured: GraphKeys, num_decodes: int) -> list[int]:
    """How many tokens of prompts captured steps have room for beside so many decodes, ascending."""
    keys = captured[GraphKind.WITH_PROMPTS]
    beside = min((key.num_decodes for key in keys if key.num_decodes >= num_decodes), default=0)
    return [key.num_prompt_tokens for key in keys if key.num_decodes == beside > 0]


def has_room_for_writes(key: GraphKey, writes: TableWrites) -> bool:
    """Whether a graph can do the table writes of its step: one page a slice, and no tokens."""
    has_only_pages = len(writes.tokens) == 0 and not writes.copies
    return has_only_pages and len(writes.pages) <= key.num_slices


def most_decodes(asked: int | None, num_rows: int) -> int:
    """The most decodes that are captured: as the option says, or those of all running requests."""
    return min(_MAX_DECODES if asked is None else asked, num_rows)


def most_prompt_tokens(max_tokens: int, weight_bytes: int) -> int:
    """The most tokens of prompts that are worth a graph.

    Args:
        max_tokens: of a request; padding stands in the row of one.
        weight_bytes: bytes of weights that a step reads, without experts.
    """
    return min(max_tokens, _MAX_PROMPT_WORK // weight_bytes)


def graph_keys(max_decodes: int, max_prompt_tokens: int) -> GraphKeys:
    """What a GPU captures; every second size of decodes with a shared prefix."""
    decodes = size_ladder(max_decodes)
    every_second = {*range(_MIN_SHARING_DECODES, max_decodes, 16)}
    if max_decodes >= _MIN_SHARING_DECODES:
        every_second.add(max_decodes)
    sharing = [size for size in decodes if size in every_second]
    return {
        GraphKind.DECODES: [GraphKey(GraphKind.DECODES, size) for size in decodes],
        GraphKind.SHARED_PREFIX: [GraphKey(GraphKind.SHARED_PREFIX, size) for size in sharing],
        GraphKind.WITH_PROMPTS: _keys_with_prompts(max_decodes, max_prompt_tokens),
    }


def _keys_with_prompts(max_decodes: int, max_prompt_tokens: int) -> list[GraphKey]:
    kind = GraphKind.WITH_PROMPTS
    keys = [GraphKey(kind, 0, 1, size) for size in _LONE_SIZES if size <= max_prompt_tokens]
    smaller = [size for size in _DECODES_BESIDE_PROMPTS if size < max_decodes]
    for num_decodes in (*smaller, max_decodes):
        for size in _STEP_SIZES:
            num_prompt_tokens = size - num_decodes
            if _MIN_PROMPT_TOKENS <= num_prompt_tokens <= max_prompt_tokens:
                keys.append(GraphKey(kind, num_decodes, MAX_PROMPTS, num_prompt_tokens))
    return _smallest_first(keys)


def _smallest_first(keys: list[GraphKey]) -> list[GraphKey]:
    return sorted(keys, key=lambda key: (key.num_tokens, key.num_decodes))


def cpu_graph_keys(max_decodes: int, max_prompt_tokens: int) -> GraphKeys:
    """What a CPU captures: steps of few tokens. Of more, the work takes far longer than its calls.

    Args:
        max_prompt_tokens: of a request; padding stands in the row of one.
    """
    kind = GraphKind.WITH_PROMPTS
    with_prompts = []
    for num_decodes in _up_to(max_decodes, _CPU_DECODES_BESIDE_PROMPTS):
        num_prompts = _MAX_CPU_PROMPTS if num_decodes else 1
        for size in _CPU_PROMPT_TOKENS:
            if size <= max_prompt_tokens:
                with_prompts.append(GraphKey(kind, num_decodes, num_prompts, size))
    decodes = _up_to(max_decodes, _CPU_DECODES)
    return {
        GraphKind.DECODES: [GraphKey(GraphKind.DECODES, size) for size in decodes],
        GraphKind.SHARED_PREFIX: [],
        GraphKind.WITH_PROMPTS: _smallest_first(with_prompts),
    }


def _up_to(most: int, sizes: list[int]) -> list[int]:
    """The sizes that are not larger, and the largest possible one."""
    return sorted({min(size, most) for size in sizes})


def size_ladder(largest: int) -> list[int]:
    """1, 2, 4, multiples of 8 to 256, then multiples of 32, and the largest."""
    steps = itertools.chain((1, 2, 4), range(8, 256, 8), range(256, largest, 32))
    return [*(size for size in steps if size < largest), largest]


def some_keys(keys: list[GraphKey]) -> list[GraphKey]:
    """The smallest, one in the middle, and the two largest."""
    chosen = {0, len(keys) // 2, len(keys) - 2, len(keys) - 1}
    return [key for i, key in enumerate(keys) if i in chosen]
