"""The sizes with which a model's kernels are called before the first step, and the device."""

# Dimensions: H head width, K kv heads, P pages, Q positions of a page, R rows of the tables.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedInfo
from minisgl.engine.limits import RowLimits
from minisgl.kvcache import MHAKVCache
from minisgl.layers import VocabShard

_ALIGNED = 16  # what Triton asks whether it divides an int


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """The sizes and dtypes with which the steps of a rank call kernels.

    Attributes:
        rows: for the model's context; the pool, which may be smaller, is made later.
        attn: the attention backends, as in `EngineConfig`.
    """

    model: ModelConfig
    info: DistributedInfo
    vocab: VocabShard
    rows: RowLimits
    attn: str
    dtype: torch.dtype
    device: torch.device

    @property
    def num_heads(self) -> int:
        return len(self.info.shard_heads(self.model.num_heads))

    @property
    def num_kv_heads(self) -> int:
        return len(self.info.shard_kv_heads(self.model.num_kv_heads))

    @property
    def mlp_width(self) -> int | None:
        """The width of an MLP without experts on this rank; None if all layers have experts."""
        if not self.model.dense_layers:
            return None
        return len(self.info.shard(self.model.mlp_width, "columns of an mlp"))

    def numbers(self, *shape: int) -> Tensor:
        """Zeros in the dtype of activations."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """Zeros of this shape, in the memory of one row.

        Its rows are 0 numbers apart, which Triton takes for a multiple of 16, as those of nearly
        all models are.
        """
        return self.numbers(1, inputs).expand(outputs, inputs)

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def page_table_RP(self) -> Tensor:
        return self.ints(1, self.rows.num_row_pages)

    def kv_PQKH(self) -> tuple[Tensor, Tensor]:
        """Pools of a page."""
        pool = MHAKVCache(
            1,
            self.num_kv_heads,
            self.model.head_dim,
            1,
            self.rows.page_size,
            self.dtype,
            self.device,
        )
        return pool.k_cache(0), pool.v_cache(0)


def small_size(size: int) -> int:
    """A small size that Triton does not tell apart from this one."""
    if size % _ALIGNED == 0:
        return _ALIGNED
    return min(size, 2)
