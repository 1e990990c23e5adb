"""Contract of an attention backend."""

# Dimension key: T tokens in the batch, N query heads, K kv heads, H head dim.

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from minisgl.core import Batch, BatchPlan


class BaseAttnMetadata(ABC):  # noqa: B024 - a common name; each backend has its own fields
    """What a backend computes once a step and reads in every layer."""


class BaseAttnBackend(ABC):
    """Causal softmax attention of each slice's queries over its request's keys and values so far."""

    @abstractmethod
    def prepare(self, plan: BatchPlan) -> BaseAttnMetadata:
        """Read the page table for this plan. Valid for this step only."""

    @abstractmethod
    def forward(self, q_TNH: Tensor, layer: int, batch: Batch) -> Tensor:
        """Attend to the keys and values in the pool, where those of this batch stand already.

        Scores are scaled by 1 / sqrt(H). Query head n reads kv head n * K // N.

        Args:
            q_TNH: contiguous.

        Returns:
            o_TNH, q's dtype.
        """
