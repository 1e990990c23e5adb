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

from minisgl.core import IntArray, ReqSlice
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


class _Masks:
    """The masks of a step, at a place that graphs know.

    They come on a stream of their own, so that they are there when the logits are.
    """

    def __init__(self, device: torch.device, max_masks: int, vocab_size: int) -> None:
        self.bits_XW = torch.full((max_masks, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        if device.type != "cpu":
            self._stream, self._sent = torch.cuda.Stream(device), torch.cuda.Event()

    def put(self, bits_XW: IntArray) -> None:
        """In the place of those before, which were used: their tokens are known."""
        if not self.bits_XW.is_cuda:
            self.bits_XW[: len(bits_XW)] = torch.from_numpy(bits_XW)
            return
        with torch.cuda.stream(self._stream):
            self.bits_XW[: len(bits_XW)].copy_(torch.from_numpy(bits_XW), non_blocking=True)  # out of pinned memory
            self._sent.record()
        self._sent.wait()


class TokenChooser:
    """Chooses on rank 0 and tells the others.

    Args:
        staging: for what is sent between a step's logits and its tokens.
    """

    def __init__(
        self, comm: DistributedCommunicator, token_pool_RL: Tensor, model: ModelConfig, staging: Staging
    ) -> None:
        self._comm = comm
        self._token_pool_RL = token_pool_RL
        self._eos_ids = model.eos_ids
        self._staging = staging
        self._masks = _Masks(token_pool_RL.device, len(token_pool_RL), model.vocab_size)

    def choose(self, step: LogitsStep, changing: Sequence[tuple[int, ReqSlice]] = ()) -> Tensor:
        """Tokens, int32 [B], also in the token pool.

        Args:
            changing: the slices that want their logits changed, with their index; none when it is recorded.
        """
        if step.logits_BV is None:
            token_B = torch.empty_like(step.place_B)
        else:
            if step.args.is_masked:
                mask_logits(step.logits_BV, step.args.mask_B, self._masks.bits_XW)
            token_B = sample(step.logits_BV, step.args)
            for begin in range(0, len(changing), _ROWS):
                self._choose_again(token_B, step.logits_BV, changing[begin : begin + _ROWS])
        self._comm.broadcast(token_B)
        scatter(self._token_pool_RL, step.place_B, token_B)
        return token_B

    def _choose_again(self, token_B: Tensor, logits_BV: Tensor, changing: Sequence[tuple[int, ReqSlice]]) -> None:
        index_X, parts = self.index(i for i, _ in changing), [part for _, part in changing]
        logits_XV = logits_BV[index_X].float()
        change_logits(logits_XV, parts, self._token_pool_RL, self._eos_ids, self._staging)
        token_B[index_X] = sample(logits_XV, BatchSamplingArgs.of(parts, self._staging))

    def finish(
        self, step: LogitsStep, parts: list[ReqSlice], logits_BV: Tensor | None, masks: IntArray | None
    ) -> tuple[Tensor, LogprobsOutput | None]:
        """The tokens of a step's slices that sample, and what some want to know of them.

        Whether a graph is replayed depends on the slices alone, so all ranks do the same.

        Args:
            logits_BV: those of the step without padding, in the same memory; masked here.
            masks: int32 [X, W], as `mask_logits` takes them, of the slices whose requests have a grammar.
        """
        special = [(i, part) for i, part in enumerate(parts) if not part.req.is_plain]
        changing = [(i, part) for i, part in special if wants_change(part)]
        asked = {i: n for i, part in special if (n := part.req.params.logprobs) is not None}
        asked_XV = None if logits_BV is None or not asked else logits_BV[self.index(asked)]  # as they are before a mask
        if masks is not None:
            self._masks.put(masks)
        if step.recorded and not changing:
            graph, token_B = step.recorded
            graph.replay()
        else:
            token_B = self.choose(step, changing)
        if asked_XV is None:
            return token_B[: len(parts)], None
        logprobs = LogprobsOutput(list(asked), asked_XV, token_B[self.index(asked)], list(asked.values()))
        return token_B[: len(parts)], logprobs

    def index(self, rows: Iterable[int]) -> Tensor:
        """Of rows of a tensor on the device."""
        [index_X] = self._staging.send(np.fromiter(rows, dtype=np.int32))
        return index_X.long()
