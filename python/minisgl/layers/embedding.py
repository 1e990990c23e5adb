"""Token embedding and output head, sharded by vocabulary."""

# Dimensions: B requests of a step, D model width, T tokens of a step, V vocabulary.

from __future__ import annotations

import logging

import torch
from torch import Tensor

from minisgl.distributed import DistributedCommunicator
from minisgl.errors import CheckpointError
from minisgl.kernel import embed
from minisgl.layers.base import BaseOP, WeightSource
from minisgl.layers.linear import LinearBase
from minisgl.layers.vocab_shard import VocabShard
from minisgl.layers.weights import LayerShard, LinearWeight, load_linear_weight

logger = logging.getLogger(__name__)


class VocabParallelEmbedding(BaseOP):
    """The embedding of tokens; each rank holds a range of the vocabulary.

    The last ranks may hold fewer rows than the others, or none.

    Args:
        tied_name: of the output head that has the same weight; None if none has.

    Attributes:
        weight_VD: the rows of this rank, in the compute dtype.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        comm: DistributedCommunicator,
        tied_name: str | None = None,
    ) -> None:
        self._shape = (vocab_size, width)
        self._tied_name = tied_name
        self._comm = comm
        self._shard = VocabShard(vocab_size, comm).tokens

    def load(self, source: WeightSource, name: str = "") -> None:
        stored = f"{name}.weight"
        if self._tied_name is not None and stored not in source:
            # The one weight may be stored under either name.
            tied = f"{self._tied_name}.weight"
            stored = tied if tied in source else stored
        self.weight_VD = source.read(stored, self._shape, rows=self._shard)

    def forward(self, input_ids_T: Tensor) -> Tensor:
        """x_TD of int64 ids."""
        if self._comm.info.size == 1:
            return embed(input_ids_T, self.weight_VD)
        if not self._shard:
            return self._comm.all_reduce(self.weight_VD.new_zeros(len(input_ids_T), self._shape[1]))
        local_T = input_ids_T - self._shard.start
        is_elsewhere_T1 = ((local_T < 0) | (local_T >= len(self._shard)))[:, None]
        x_TD = embed(local_T.clamp(0, len(self._shard) - 1), self.weight_VD)
        return self._comm.all_reduce(x_TD.masked_fill_(is_elsewhere_T1, 0))


class ParallelLMHead(LinearBase):
    """Logits; each rank computes those of its range of the vocabulary.

    A head that the config ties, but that is stored with other values than the embedding, is not
    tied, as in transformers. It stays tied if the stored tensor cannot be read as a head.

    Args:
        tied: the embedding whose weight is also the head's, if the checkpoint says so.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        comm: DistributedCommunicator,
        tied: VocabParallelEmbedding | None,
    ) -> None:
        self._shape = (vocab_size, width)
        self._tied = tied
        self._comm = comm
        self._vocab = VocabShard(vocab_size, comm)

    def load(self, source: WeightSource, name: str = "") -> None:
        shard = LayerShard(name, self._shape, outputs=self._vocab.tokens)
        if self._tied is None:
            self._weight = load_linear_weight(source, [shard])
            return
        untied = None
        if f"{name}.weight" in source:
            untied = self._read_untied(source, shard, self._tied.weight_VD)
        # The embedding is held in the compute dtype.
        self._weight = untied or LinearWeight(self._tied.weight_VD)

    def _read_untied(
        self, source: WeightSource, shard: LayerShard, embedding_VD: Tensor
    ) -> LinearWeight | None:
        """What is stored of a head that should be tied; None if it stays tied, on all ranks."""
        stored = None
        reason = "another rank cannot read it"
        try:
            stored = load_linear_weight(source, [shard])
        except CheckpointError as error:
            reason = str(error)
        if not self._is_so_on_all_ranks(stored is not None, embedding_VD.device):
            if self._comm.info.leads:
                logger.warning(
                    "%s.weight is not used, the head is tied to the embedding: %s",
                    shard.name,
                    reason,
                )
            return None

        assert stored is not None
        if self._is_so_on_all_ranks(stored.equals(embedding_VD), embedding_VD.device):
            return None
        if self._comm.info.leads:
            logger.warning(
                "config.json: tie_word_embeddings is true, but %s.weight is not the embedding; "
                "both are used as they are stored",
                shard.name,
            )
        return stored

    def _is_so_on_all_ranks(self, is_so: bool, device: torch.device) -> bool:
        return bool(self._comm.all_reduce_min(torch.tensor([int(is_so)], device=device)))

    def forward(self, x_BD: Tensor) -> Tensor:
        """logits_BV of this rank's `VocabShard`."""
        return self._vocab.pad(self.multiply(x_BD))
