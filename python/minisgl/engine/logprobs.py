"""Log probabilities of tokens, on their way to the host."""

# Dimensions: C candidates, V vocabulary, X a selection out of another dimension.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from minisgl.core import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of some tokens, and of the likeliest tokens at their positions.

    Attributes:
        logprob_X: float32.
        top_XC, id_XC: float32 and int64, the likeliest first.
    """

    logprob_X: Tensor
    top_XC: Tensor
    id_XC: Tensor

    @classmethod
    def of(cls, logits_XV: Tensor, token_X: Tensor, num_top: int) -> Self:
        """
        Args:
            logits_XV: the model's logits for the tokens, neither masked nor changed.
            token_X: the scores of `NO_TOKEN` are those of token 0.
        """
        logprob_XV = torch.log_softmax(logits_XV.float(), dim=-1)
        token_logprob_X1 = logprob_XV.gather(1, token_X.long().clamp(min=0)[:, None])
        top_XC, id_XC = logprob_XV.topk(min(num_top, logprob_XV.shape[1]), dim=-1)
        return cls(token_logprob_X1[:, 0], top_XC, id_XC)

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Self:
        """Those of all parts, one after the other."""
        return cls(
            torch.cat([part.logprob_X for part in parts]),
            torch.cat([part.top_XC for part in parts]),
            torch.cat([part.id_XC for part in parts]),
        )


class LogprobsOutput:
    """Log probabilities of some tokens of a step.

    Args:
        index: which of the sampled tokens they are.
        num_top: how many of the likeliest each wants.
    """

    def __init__(self, index: list[int], scores: Scores, num_top: list[int]) -> None:
        self._index = index
        self._num_top = num_top
        self._logprob_X = scores.logprob_X.to("cpu", non_blocking=True)
        self._top_XC = scores.top_XC.to("cpu", non_blocking=True)
        self._id_XC = scores.id_XC.to("cpu", non_blocking=True)

    def read(self) -> dict[int, TokenLogprobs]:
        """Return all by index of the sampled token. To be called after the tokens have come."""
        top_ids = self._id_XC.tolist()
        top_logprobs = self._top_XC.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        for x, logprob in enumerate(self._logprob_X.tolist()):
            top = list(zip(top_ids[x], top_logprobs[x], strict=True))
            logprobs[self._index[x]] = TokenLogprobs(logprob, top[: self._num_top[x]])
        return logprobs
