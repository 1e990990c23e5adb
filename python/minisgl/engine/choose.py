"""From the logits of a step to tokens in the token pool, the same on all ranks.

What all requests want is one function, `TokenChooser.choose`, which graphs record. Before it masks come from the host;
log probabilities are taken after it. Where a request wants other logits than the model's, the function is called and
not replayed: it chooses for those requests again, from changed copies of their logits.
"""

# Dimension key: B requests that sample, with the padding of a graph, X those that ask for something, V vocab, W words
# of 32 bits, R table rows, L positions.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core import ReqSlice
from minisgl.distributed import DistributedCommunicator
from minisgl.engine.logits import LogprobsOutput, change_logits, wants_change
from minisgl.engine.sample import BatchSamplingArgs, sample
from minisgl.kernel import mask_logits, scatter
from minisgl.models import ModelConfig
from minisgl.utils.staging import Staging

_ROWS = 32  # of logits that are changed at a time, which takes many copies of them


@dataclass(frozen=True, slots=True)
class LogitsStep:
    """A step whose logits are being computed; what it is padded with comes last.

    Attributes:
        logits_BV: None on ranks that do not sample, and where nothing does.
        place_B: int32, flat, of the token pool: where the tokens go.
        recorded: a graph that does what `choose` does with these tensors, and where it leaves the tokens.
    """

    logits_BV: Tensor | None
    args: BatchSamplingArgs
    place_B: Tensor
    recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None


class TokenChooser:
    """Chooses on rank 0 and tells the others.

    Args:
        staging: for what is sent between a step's logits and its tokens.

    Attributes:
        bits_XW: the masks of the step that is sampled next, as `mask_logits` takes them. On the host: a step reads them
            once, where it would otherwise have to be told to copy them.
    """

    def __init__(
        self,
        comm: DistributedCommunicator,
        token_pool_RL: Tensor,
        model: ModelConfig,
        staging: Staging,
    ) -> None:
        self._comm = comm
        self._token_pool_RL = token_pool_RL
        self._eos_ids = model.eos_ids
        self._staging = staging
        shape = len(token_pool_RL), -(-model.vocab_size // 32)
        self.bits_XW = torch.full(shape, -1, dtype=torch.int32, pin_memory=token_pool_RL.is_cuda)

    def choose(self, step: LogitsStep, changing: Sequence[tuple[int, ReqSlice]] = ()) -> Tensor:
        """Tokens, int32 [B], also in the token pool.

        Args:
            changing: the slices that want their logits changed, with their index; none when it is recorded.
        """
        if step.logits_BV is None:
            token_B = torch.empty_like(step.place_B)
        else:
            if step.args.is_masked:
                mask_logits(step.logits_BV, step.args.mask_B, self.bits_XW)
            token_B = sample(step.logits_BV, step.args)
            for begin in range(0, len(changing), _ROWS):
                self._choose_again(token_B, step.logits_BV, changing[begin : begin + _ROWS])
        self._comm.broadcast(token_B)
        scatter(self._token_pool_RL, step.place_B, token_B)
        return token_B

    def _choose_again(
        self, token_B: Tensor, logits_BV: Tensor, changing: Sequence[tuple[int, ReqSlice]]
    ) -> None:
        index_X, parts = self.index(i for i, _ in changing), [part for _, part in changing]
        logits_XV = logits_BV[index_X].float()
        change_logits(logits_XV, parts, self._token_pool_RL, self._eos_ids, self._staging)
        token_B[index_X] = sample(logits_XV, BatchSamplingArgs.of(parts, self._staging))

    def finish(
        self, step: LogitsStep, parts: list[ReqSlice], logits_BV: Tensor | None
    ) -> tuple[Tensor, LogprobsOutput | None]:
        """The tokens of a step's slices that sample, and what some want to know of them.

        Whether a graph is replayed depends on the slices alone, so all ranks do the same.

        Args:
            logits_BV: those of the step without padding, in the same memory; masked here.
        """
        special = [(i, part) for i, part in enumerate(parts) if not part.req.is_plain]
        changing = [(i, part) for i, part in special if wants_change(part)]
        asked = {i: n for i, part in special if (n := part.req.params.logprobs) is not None}
        asked_XV = (
            None if logits_BV is None or not asked else logits_BV[self.index(asked)]
        )  # as they are before a mask
        if step.recorded and not changing:
            graph, token_B = step.recorded
            graph.replay()
        else:
            token_B = self.choose(step, changing)
        if asked_XV is None:
            return token_B[: len(parts)], None
        logprobs = LogprobsOutput(
            list(asked), asked_XV, token_B[self.index(asked)], list(asked.values())
        )
        return token_B[: len(parts)], logprobs

    def index(self, rows: Iterable[int]) -> Tensor:
        """Of rows of a tensor on the device."""
        [index_X] = self._staging.send(np.fromiter(rows, dtype=np.int32))
        return index_X.long()
