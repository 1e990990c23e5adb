"""What some requests want to know of their prompts: log probabilities of the tokens, or a vector for the whole.

For log probabilities a slice has the hidden states of all its tokens among those that the model returns, not of the
last alone. Few of them are made logits at a time, whatever the prompt's length. The vector is the last token's hidden
state, normalised.
"""

# Dimension key: W tokens whose hidden states are wanted, D model width, V vocab, R table rows, L positions.

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from minisgl.core import BatchPlan, ReqSlice, TokenLogprobs
from minisgl.engine.logits import LogprobsOutput

_ROWS = 32


class PromptsOutput:
    """What was asked of prompts, on its way to the host.

    Args:
        x_WD: of all slices, one after the other; there may be more behind them.
        logits: the model's; rank 0 alone has them, but all ranks call it for the same rows.
    """

    def __init__(
        self,
        plan: BatchPlan,
        x_WD: Tensor,
        logits: Callable[[Tensor], Tensor | None],
        token_pool_RL: Tensor,
    ) -> None:
        self._logits = logits
        self._logprobs: dict[int, list[LogprobsOutput]] = {}
        self._vectors: dict[int, Tensor] = {}
        end = 0
        for i, part in enumerate(plan.slices):
            begin, end = end, end + part.num_hidden_states
            if part.req.params.embeds and part.samples and part.end == part.req.num_prompt:
                self._vectors[i] = F.normalize(x_WD[end - 1].float(), dim=0).to(
                    "cpu", non_blocking=True
                )
            if part.req.scores_prompt:
                next_token_W = token_pool_RL[part.row, part.start + 1 : part.end + 1]
                self._logprobs[i] = self._score(part, x_WD[begin:end], next_token_W)

    @classmethod
    def of(
        cls,
        plan: BatchPlan,
        x_WD: Tensor,
        logits: Callable[[Tensor], Tensor | None],
        token_pool_RL: Tensor,
    ) -> Self | None:
        """None if nobody asks."""
        asks = any(not part.req.is_plain and part.req.wants_prompt_outputs for part in plan.slices)
        return cls(plan, x_WD, logits, token_pool_RL) if asks else None

    def _score(self, part: ReqSlice, x_WD: Tensor, next_token_W: Tensor) -> list[LogprobsOutput]:
        """Of the tokens of the prompt that follow those of a slice."""
        num_scored = (
            len(part) - part.samples
        )  # what follows the last token of a prompt is not of the prompt
        outputs = []
        for begin in range(0, num_scored, _ROWS):
            rows = slice(begin, min(begin + _ROWS, num_scored))
            logits_XV, token_X = self._logits(x_WD[rows]), next_token_W[rows]
            if logits_XV is not None:
                num_top = [part.req.params.prompt_logprobs or 0] * len(token_X)
                outputs.append(
                    LogprobsOutput(list(range(len(token_X))), logits_XV, token_X, num_top)
                )
        return outputs

    def read_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """By index of the slice; only after the tokens of the plan have come."""
        return {
            i: [told for out in outputs for told in out.read().values()]
            for i, outputs in self._logprobs.items()
        }

    def read_embeddings(self) -> dict[int, bytes]:
        """The same; float32, little-endian."""
        return {
            i: vector_D.numpy().astype("<f4").tobytes() for i, vector_D in self._vectors.items()
        }
