"""The vocabulary of a tensor-parallel group: which tokens a rank has, and how ranks join theirs.

Each rank computes the logits of its tokens and chooses one of them. Then ranks exchange one
number per request (`agree`). Logits are joined for two purposes only: filters look at all of them
(`join`), and log probabilities are made of them on rank 0 (`collect`).
"""

# Dimensions: B requests of a step, V vocabulary, W words of 32 bits, X a selection out of another
# dimension.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import DistributedCommunicator
from minisgl.kernel import SEGMENT_SIZE, mask_logits

_WORD = 32


class VocabShard:
    """The tokens of one rank: a range of whole segments, as `choose_scored_tokens` needs them.

    A segment is a whole number of words of 32 tokens, the words of grammar masks.

    Logits of a shard have equally many columns on all ranks. The last ranks may have fewer tokens,
    or none: there, minus infinity stands in the last columns, which never win.

    Attributes:
        size: of the whole vocabulary.
        tokens: of this rank.
        first_token: whose logits are the first column.
    """

    def __init__(self, vocab_size: int, comm: DistributedCommunicator) -> None:
        self.size = vocab_size
        self._comm = comm
        num_segments = -(-vocab_size // SEGMENT_SIZE)
        segments = comm.info.shard_padded(num_segments)
        segments_each = -(-num_segments // comm.info.size)
        self.first_token = segments.start * SEGMENT_SIZE
        end = min(segments.stop * SEGMENT_SIZE, vocab_size)
        self.tokens = range(min(self.first_token, vocab_size), end)
        self._num_columns = min(segments_each * SEGMENT_SIZE, vocab_size)

    @property
    def is_whole(self) -> bool:
        """Whether there is one rank, which has all tokens."""
        return self._comm.info.size == 1

    def pad(self, logits_BV: Tensor) -> Tensor:
        """Add the columns without a token to the logits of this rank's tokens."""
        missing = self._num_columns - len(self.tokens)
        return F.pad(logits_BV, (0, missing), value=-float("inf")) if missing else logits_BV

    def mask(self, logits_BV: Tensor, mask_B: Tensor, bits_XW: Tensor) -> None:
        """Do what `mask_logits` does, to the logits of this rank's tokens; masks are whole."""
        if not self.tokens:
            return
        first_word = self.first_token // _WORD
        mask_logits(logits_BV[:, : len(self.tokens)], mask_B, bits_XW[:, first_word:])

    def join(self, logits_BV: Tensor) -> Tensor:
        """Logits of the whole vocabulary, on every rank."""
        return self._comm.all_gather(logits_BV)[:, : self.size]

    def collect(self, logits_BV: Tensor) -> Tensor | None:
        """Logits of the whole vocabulary on rank 0, None on the others."""
        whole_BV = self._comm.gather(logits_BV)
        return None if whole_BV is None else whole_BV[:, : self.size]

    def agree(self, scored_B: Tensor) -> Tensor:
        """Return the tokens that ranks agree on, int32, equal on all of them.

        Args:
            scored_B: of this rank (`choose_scored_tokens`); overwritten.
        """
        return self._comm.all_reduce_min(scored_B).int()
