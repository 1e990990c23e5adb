"""Which captured graph takes a plan: the kinds of graphs, and the choice among captured ones.

Which sizes are captured is in `sizes.py`. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from minisgl.core import FEWEST_IN_GROUP, BatchPlan, TableWrites


class GraphKind(Enum):
    """Which steps a graph computes.

    Attributes:
        DECODES: each slice is one token, and samples.
        WITH_PROMPTS: any other step that does not return the hidden states of all its tokens.
    """

    DECODES = "decodes"
    WITH_PROMPTS = "decodes and prompts"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The size of a captured graph; its kind follows from that.

    Attributes:
        num_tokens: of all slices together.
        num_decodes: leading slices of one token.
        num_prompts: other slices; 0 in a graph of decodes. Where there are any, decodes may be
            missing, too, and leave their tokens to prompts.
        has_groups: whether groups of decodes read once what they share. That takes one more kernel
            in each layer, also in a step without groups.
    """

    num_tokens: int
    num_decodes: int
    num_prompts: int = 0
    has_groups: bool = False

    def __post_init__(self) -> None:
        assert self.num_decodes <= self.num_tokens, "a missing decode also reads a query"

    @property
    def kind(self) -> GraphKind:
        return GraphKind.WITH_PROMPTS if self.num_prompts else GraphKind.DECODES

    @property
    def num_slices(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_groups(self) -> int:
        """Groups of decodes that it has room for: as many as its decodes can make."""
        return self.num_decodes // FEWEST_IN_GROUP if self.has_groups else 0

    @property
    def num_token_writes(self) -> int:
        """Token writes that the graph has room for: as many as its prompts may have tokens."""
        return self.num_tokens if self.num_prompts else 0

    def num_page_writes(self, page_size: int) -> int:
        """Page writes that the graph has room for: pages of its tokens, and one more per slice."""
        return self.num_slices + self.num_token_writes // page_size


# Of each kind, those of fewest tokens first, of these, those of fewest decodes, and of these, those
# without groups.
GraphKeys = dict[GraphKind, list[GraphKey]]


def find_graph_key(plan: BatchPlan, keys: GraphKeys) -> GraphKey | None:
    """The smallest captured graph that takes a plan, if there is one.

    It has groups if the plan has some and any such graph takes it.
    """
    slices = plan.slices
    if all(req_slice.samples and req_slice.start + 1 == req_slice.end for req_slice in slices):
        kind = GraphKind.DECODES
        num_decodes = len(slices)
    elif not plan.returns_all:
        kind = GraphKind.WITH_PROMPTS
        # One token alone is computed like a prompt, by a graph that has no room for decodes.
        num_decodes = plan.num_decodes if len(slices) > 1 else 0
    else:
        return None

    num_tokens = plan.num_tokens
    num_prompts = len(slices) - num_decodes
    has_groups = bool(plan.prefix_groups)
    without_groups = None
    for key in keys[kind]:
        if (
            key.num_tokens >= num_tokens
            and key.num_decodes >= num_decodes
            and key.num_prompts >= num_prompts
        ):
            if key.has_groups == has_groups:
                return key
            if not key.has_groups:
                without_groups = without_groups or key
    return without_groups


def unpadded_prompt_sizes(keys: GraphKeys, num_decodes: int) -> list[int]:
    """How many tokens of prompts captured steps have room for beside so many decodes, ascending.

    None is less than what the smallest step with a prompt has room for.
    """
    with_prompts = keys[GraphKind.WITH_PROMPTS]
    sizes = {key.num_tokens - num_decodes for key in with_prompts if key.num_decodes >= num_decodes}
    return sorted(size for size in sizes if size >= with_prompts[0].num_tokens)


def has_room_for_writes(key: GraphKey, writes: TableWrites, page_size: int) -> bool:
    """Whether a graph can do the table writes of its step.

    Those of a prompt fit if one step computes it whole. A prompt that is computed in chunks, or
    begins with a cached prefix, writes more at its admission than its step computes.
    """
    return (
        len(writes.pages) <= key.num_page_writes(page_size)
        and len(writes.tokens) <= key.num_token_writes
        and not writes.copies
    )
