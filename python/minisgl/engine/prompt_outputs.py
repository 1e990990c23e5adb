"""Outputs about prompts: logprobs of the tokens, or an embedding of the whole prompt.

For logprobs the model returns the hidden states of all tokens of a step, not only of the last token
of each slice. Only a few at a time become logits, whatever the prompt's length. The embedding is
the last token's hidden state, normalised.
"""

# Dimensions: D model width, L positions of a sequence, R rows of the tables, V vocabulary, X a
# selection out of another dimension, Y tokens whose hidden states are returned.

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from minisgl.core import BatchPlan, ReqSlice, TokenLogprobs
from minisgl.engine.logprobs import LogprobsOutput, Scores

_MAX_SCORED_ROWS = 32  # hidden states that become logits at a time

LogitsFunction = Callable[[Tensor], Tensor | None]


class PromptOutputs:
    """Logprobs and embeddings of a step's prompts, on their way to the host.

    Args:
        hidden_YD: of all slices, one after the other; padding may follow.
        logits: computes logits of the whole vocabulary. Only rank 0 gets them, but all ranks call
            it for the same rows.
    """

    def __init__(
        self, plan: BatchPlan, hidden_YD: Tensor, logits: LogitsFunction, token_pool_RL: Tensor
    ) -> None:
        self._logits = logits
        self._logprobs: dict[int, LogprobsOutput | None] = {}
        self._embeddings: dict[int, Tensor] = {}
        end = 0
        for i, req_slice in enumerate(plan.slices):
            begin = end
            end = begin + plan.num_returned(req_slice)
            if _completes_embedding(req_slice):
                vector_D = F.normalize(hidden_YD[end - 1].float(), dim=0)
                self._embeddings[i] = vector_D.to("cpu", non_blocking=True)
            if req_slice.scores_prompt:
                next_positions = slice(req_slice.start + 1, req_slice.end + 1)
                next_token_Y = token_pool_RL[req_slice.row, next_positions]
                self._logprobs[i] = self._score(req_slice, hidden_YD[begin:end], next_token_Y)

    @classmethod
    def of(
        cls, plan: BatchPlan, hidden_YD: Tensor, logits: LogitsFunction, token_pool_RL: Tensor
    ) -> Self | None:
        """Make those of a plan; None if no request wants any."""
        for req_slice in plan.slices:
            # An attribute first: it takes less time than a property, and most need only sampling.
            if not req_slice.req.needs_only_sampling and req_slice.req.wants_prompt_outputs:
                return cls(plan, hidden_YD, logits, token_pool_RL)
        return None

    def _score(
        self, req_slice: ReqSlice, hidden_YD: Tensor, next_token_Y: Tensor
    ) -> LogprobsOutput | None:
        """Logprobs of the prompt's tokens that follow those of a slice; None if there are none."""
        num_scored = len(req_slice)
        if req_slice.samples:
            num_scored -= 1  # the token after the last one of a prompt belongs to the answer
        num_top = req_slice.req.params.prompt_logprobs or 0
        parts: list[Scores] = []
        for begin in range(0, num_scored, _MAX_SCORED_ROWS):
            rows = slice(begin, min(begin + _MAX_SCORED_ROWS, num_scored))
            logits_XV = self._logits(hidden_YD[rows])
            if logits_XV is not None:
                parts.append(Scores.of(logits_XV, next_token_Y[rows], num_top))
        if not parts:
            return None
        return LogprobsOutput(list(range(num_scored)), Scores.join(parts), [num_top] * num_scored)

    def read_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return logprobs by index of the slice. Call it after the tokens of the plan have come."""
        return {
            i: list(output.read().values()) if output else []
            for i, output in self._logprobs.items()
        }

    def read_embeddings(self) -> dict[int, bytes]:
        """Return float32, little-endian, by index of the slice.

        Call it after the tokens of the plan have come.
        """
        return {
            i: vector_D.numpy().astype("<f4").tobytes() for i, vector_D in self._embeddings.items()
        }


def _completes_embedding(req_slice: ReqSlice) -> bool:
    is_end_of_prompt = req_slice.samples and req_slice.end == req_slice.req.num_prompt
    return req_slice.req.params.embeds and is_end_of_prompt
