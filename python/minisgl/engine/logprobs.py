"""Log probabilities of tokens, on their way to the host."""

# Dimensions: C candidates, V vocabulary, X a selection out of another dimension.

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import TokenLogprobs


class LogprobsOutput:
    """Log probabilities of some tokens of a step, and of the likeliest tokens in their places.

    Args:
        index: which of the sampled tokens they are.
        logits_XV: the model's logits for them, neither masked nor changed.
        num_top: how many of the likeliest each wants.
    """

    def __init__(
        self, index: list[int], logits_XV: Tensor, token_X: Tensor, num_top: list[int]
    ) -> None:
        self._index = index
        self._num_top = num_top
        logprob_XV = torch.log_softmax(logits_XV.float(), dim=-1)
        token_logprob_X1 = logprob_XV.gather(1, token_X.long()[:, None])
        top_XC, id_XC = logprob_XV.topk(min(max(num_top), logprob_XV.shape[1]), dim=-1)
        self._logprob_X = token_logprob_X1[:, 0].to("cpu", non_blocking=True)
        self._top_XC = top_XC.to("cpu", non_blocking=True)
        self._id_XC = id_XC.to("cpu", non_blocking=True)

    def read(self) -> dict[int, TokenLogprobs]:
        """Return all by index of the sampled token. To be called after the tokens have come."""
        top_ids = self._id_XC.tolist()
        top_logprobs = self._top_XC.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        for x, logprob in enumerate(self._logprob_X.tolist()):
            top = list(zip(top_ids[x], top_logprobs[x], strict=True))
            logprobs[self._index[x]] = TokenLogprobs(logprob, top[: self._num_top[x]])
        return logprobs
