"""Token embedding and output head, sharded by vocabulary."""

# Dimension key: T tokens in the batch, B requests that sample, D model width, V vocab.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import DistributedCommunicator
from minisgl.layers.base import BaseOP, WeightSource
from minisgl.layers.linear import LinearBase


class VocabParallelEmbedding(BaseOP):
    """Each rank holds a range of the vocabulary, the last ones perhaps fewer rows than the others."""

    def __init__(self, vocab_size: int, width: int, comm: DistributedCommunicator) -> None:
        self._shape = (vocab_size, width)
        self._comm = comm
        self._share = comm.info.shard_padded(vocab_size)

    def load(self, source: WeightSource, name: str = "") -> None:
        self.weight_VD = source.read(f"{name}.weight", self._shape, rows=self._share)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        """x_TD of int64 ids."""
        if self._comm.info.size == 1:
            return F.embedding(input_ids_T, self.weight_VD)
        local_T = input_ids_T - self._share.start
        is_elsewhere_T1 = ((local_T < 0) | (local_T >= len(self._share)))[:, None]
        if not self._share:
            return self._comm.all_reduce(self.weight_VD.new_zeros(len(input_ids_T), self._shape[1]))
        x_TD = F.embedding(local_T.clamp(0, len(self._share) - 1), self.weight_VD)
        return self._comm.all_reduce(x_TD.masked_fill_(is_elsewhere_T1, 0))


class ParallelLMHead(LinearBase):
    """Logits; each rank computes those of its range of the vocabulary and rank 0 collects them.

    Args:
        tied: the embedding whose weight it shares, if it does.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        comm: DistributedCommunicator,
        tied: VocabParallelEmbedding | None,
    ) -> None:
        self._shape = (vocab_size, width)
        self._comm = comm
        self._tied = tied
        self._share = comm.info.shard_padded(vocab_size)

    def load(self, source: WeightSource, name: str = "") -> None:
        if self._tied is not None:
            self._weight_FD = self._tied.weight_VD
        else:
            self._weight_FD = source.read(f"{name}.weight", self._shape, rows=self._share)

    def forward(self, x_BD: Tensor) -> Tensor | None:
        """logits_BV on rank 0, None on the others."""
        logits = self.multiply(x_BD)
        padding = -(-self._shape[0] // self._comm.info.size) - len(self._share)
        if padding:
            logits = F.pad(logits, (0, padding))
        logits_BV = self._comm.gather(logits)
        return None if logits_BV is None else logits_BV[:, : self._shape[0]]
