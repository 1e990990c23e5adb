"""Contract of an attention backend."""

# Dimension key: T tokens in the batch, N query heads, K kv heads, H head dim.

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from minisgl.core import BaseAttnMetadata, Batch, BatchPlan, IntArray


class BaseAttnBackend(ABC):
    """Causal softmax attention of each slice's queries over its request's keys and values so far."""

    captures_graphs = False
    attends_prompts = True

    @abstractmethod
    def prepare(self, plan: BatchPlan) -> BaseAttnMetadata:
        """Read the page table for this plan. Valid for this step only."""

    def prepare_capture(
        self, row_R: Tensor, num_tokens: int, shared_1: Tensor | None = None
    ) -> BaseAttnMetadata:
        """For a graph over num_tokens tokens of R requests: decodes, one token each, or else a prompt and its padding.

        Args:
            row_R: int32, where the requests' rows of the page table will stand.
            shared_1: int32, where the number of tokens will stand that all of them share.
        """
        raise NotImplementedError

    def prepare_replay(
        self, metadata: BaseAttnMetadata, start_R: IntArray, end_R: IntArray
    ) -> None:
        """Make the metadata of a graph those of slices [start, end)."""
        raise NotImplementedError

    def begin(self, batch: Batch) -> None:  # noqa: B027 - few have anything to do
        """What the device has to do once a step, before the layers; part of a recorded graph."""

    @abstractmethod
    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layer: int, batch: Batch
    ) -> Tensor:
        """Attend to the keys and values in the pool, where those of this batch, k and v, stand already.

        Scores are scaled by 1 / sqrt(H). Query head n reads kv head n * K // N.

        Args:
            q_TNH, k_TKH, v_TKH: the heads of a token lie side by side; tokens may lie apart.

        Returns:
            o_TNH, q's dtype.
        """
