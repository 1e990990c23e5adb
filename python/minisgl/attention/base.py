"""Contract of an attention backend. Next to read: `torch_backend.py`."""

# Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
# tables, T tokens of a step, X a selection out of another dimension.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from minisgl.checkpoint import AttentionSpec
from minisgl.core import BaseAttnMetadata, BatchPlan, IntArray, PrefixGroup, Queries
from minisgl.kernel import GroupTensors
from minisgl.kvcache import MHAKVCache


class BaseAttnBackend(ABC):
    """Causal softmax attention of each slice's queries to its request's keys and values so far.

    A step uses it for two sets of tokens: in all layers but the last for all its tokens, and in the
    last layer for those whose hidden states are returned. The latter are decodes to a backend,
    slices of one token, and have metadata of their own.

    Args:
        kv_pool: keys and values of all layers.
        page_table_RP: int32, on the device; the pages of each row's request.
        num_heads: query heads of this rank.
        specs: the attention of each layer.

    Attributes:
        supported: fields of `AttentionSpec` that may be set, apart from the scale and the rope. A
            backend gets queries and keys after their rotation (RoPE).
        head_dims: the widths of heads that it takes; None if it takes any.
        can_be_captured: whether a graph may contain its `forward`. Then `make_capture_metadata` and
            `update_metadata` are implemented. A CPU may still refuse one (`CannotBeCaptured`).
        attends_prompts: whether a slice may have several tokens.
    """

    supported: ClassVar[frozenset[str]] = frozenset()
    head_dims: ClassVar[tuple[int, ...] | None] = None
    can_be_captured = False
    attends_prompts = True

    @abstractmethod
    def __init__(
        self,
        kv_pool: MHAKVCache,
        page_table_RP: Tensor,
        num_heads: int,
        specs: Sequence[AttentionSpec],
    ) -> None: ...

    @abstractmethod
    def make_metadata(self, plan: BatchPlan) -> BaseAttnMetadata:
        """Make the metadata of a plan, on the host. Valid for this step only.

        That of decodes alone must not overwrite what other metadata of the step refers to.
        """

    def make_capture_metadata(self, slices: CapturedSlices) -> BaseAttnMetadata:
        """Make the metadata of a graph."""
        raise NotImplementedError

    def update_metadata(
        self,
        metadata: BaseAttnMetadata,
        start_X: IntArray,
        end_X: IntArray,
        first_token: int = 0,
    ) -> None:
        """Update a graph's metadata to slices [start, end), before it is replayed.

        Args:
            start_X, end_X: of each slice, in the order of the `CapturedSlices`; both 0 where one is
                missing.
            first_token: of the step, with which these slices begin. Another backend may have
                decodes before them.
        """
        raise NotImplementedError

    def prepare_on_device(self, queries: Queries) -> None:  # noqa: B027 - few have anything to do
        """Launch what `forward` needs once, for the layers in which these tokens attend.

        It is part of a captured graph.
        """

    @abstractmethod
    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, queries: Queries
    ) -> Tensor:
        """Attend to the keys and values in the pool; those of the step stand there already.

        Query head n reads kv head n * K // N.

        Args:
            q_TNH, k_TKH, v_TKH: of these tokens. The heads of a token lie side by side; tokens may
                lie apart.
            queries: those that `prepare_on_device` got last.

        Returns:
            o_TNH, q's dtype.
        """


def group_arrays(
    groups: Sequence[PrefixGroup], num_decodes: int, most_groups: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The arrays of `GroupTensors`, int32, of so many decodes, with room for so many groups."""
    num_shared_B = np.zeros(num_decodes, dtype=np.int32)
    member_B = np.zeros(num_decodes, dtype=np.int32)
    indptr = np.zeros(most_groups + 1, dtype=np.int32)
    end = 0
    for i, group in enumerate(groups):
        num_shared_B[group.members] = group.num_tokens
        begin = end
        end += len(group.members)
        member_B[begin:end] = group.members
        indptr[i + 1 :] = end
    return num_shared_B, member_B, indptr


@dataclass(frozen=True, slots=True)
class CapturedSlices:
    """The slices of a captured graph: decodes, of one token each, then prompts.

    Each part may be empty. Padding is among them: decodes of the padding row or, in a step with
    prompts, the last slice. Beside prompts the last decodes may be missing; prompts then use their
    tokens.

    Attributes:
        row_X: int32, on the device: where a replay reads the row of each slice.
        decode_position_B: int32, on the device: where a replay reads the position of each decode;
            -1 where one is missing.
        most_prompt_tokens: how many tokens the prompts may have together.
        prompt_indptr: int32, on the device: where a replay reads at which token of the step each
            prompt begins, and the number of tokens. A prompt may have no tokens. None without
            prompts.
        groups: where a replay reads which decodes share a prefix. It is a hint: a backend may
            ignore it. None if the graph has room for none.
        beside_prompts: whether the decodes are of a step with prompts. Some may then be missing.
    """

    row_X: Tensor
    decode_position_B: Tensor
    most_prompt_tokens: int = 0
    prompt_indptr: Tensor | None = None
    groups: GroupTensors | None = None
    beside_prompts: bool = False

    @property
    def num_decodes(self) -> int:
        return len(self.decode_position_B)

    @property
    def decodes(self) -> CapturedSlices:
        """The decodes alone."""
        return CapturedSlices(
            self.row_X[: self.num_decodes],
            self.decode_position_B,
            groups=self.groups,
            beside_prompts=self.beside_prompts,
        )

    @property
    def prompts(self) -> CapturedSlices:
        """The prompts alone."""
        row_X = self.row_X[self.num_decodes :]
        no_decodes = self.decode_position_B[:0]
        return CapturedSlices(row_X, no_decodes, self.most_prompt_tokens, self.prompt_indptr)
