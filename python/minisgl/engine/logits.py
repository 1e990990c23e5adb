"""What some requests want of their logits besides a token: bias, penalties, banned ends; and log probabilities.

Only the rows of those requests are touched, in copies of float32. How often a token was there before is counted on the
device, in the token pool, so that nothing has to wait for the tokens of the step before.
"""

# Dimension key: B requests that sample, X those that change their logits or ask for log probabilities, V vocab, R table
# rows, L positions, C the likeliest, E entries of bias and bans.

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from minisgl.core import ReqSlice, TokenLogprobs
from minisgl.utils.staging import Staging

_BAN = -1e9  # below all logits; a grammar's mask is lower still, so that an answer ends where it allows nothing else


def wants_change(part: ReqSlice) -> bool:
    """Whether its token is to be chosen from other logits than the model's."""
    return part.req.params.changes_logits or _is_too_short(part)


def change_logits(
    logits_XV: Tensor,
    parts: list[ReqSlice],
    token_pool_RL: Tensor,
    eos_ids: frozenset[int],
    staging: Staging,
) -> None:
    """Apply bias, bans and penalties of the slices to their rows, in place."""
    entries = [
        (x, token, value)
        for x, part in enumerate(parts)
        for token, value in chain(part.req.params.logit_bias.items(), _bans(part, eos_ids))
    ]
    if entries:
        row, token, value = zip(*entries, strict=True)
        row_E, token_E, value_E = staging.send(
            np.array(row, dtype=np.int32),
            np.array(token, dtype=np.int32),
            np.array(value, dtype=np.float32),
        )
        logits_XV.index_put_((row_E.long(), token_E.long()), value_E, accumulate=True)
    params = [part.req.params for part in parts]
    if any(
        (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0, 0, 1) for p in params
    ):
        _penalize(logits_XV, parts, token_pool_RL, staging)


def _bans(part: ReqSlice, eos_ids: frozenset[int]) -> list[tuple[int, float]]:
    """The tokens that would end an answer too early."""
    params = part.req.params
    if not _is_too_short(part):
        return []
    return [
        (token, _BAN) for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    ]


def _is_too_short(part: ReqSlice) -> bool:
    return part.end - part.req.num_prompt < part.req.params.min_tokens


def _penalize(
    logits_XV: Tensor, parts: list[ReqSlice], token_pool_RL: Tensor, staging: Staging
) -> None:
    params = [part.req.params for part in parts]
    row_X, prompt_X, end_X, *penalties = staging.send(
        *(
            np.array(x, dtype=np.int32)
            for x in zip(*((p.row, p.req.num_prompt, p.end) for p in parts), strict=True)
        ),
        *(np.array([getattr(p, name) for p in params], dtype=np.float32) for name in _PENALTIES),
    )
    presence_X1, frequency_X1, repetition_X1 = (penalty[:, None] for penalty in penalties)
    position_L = torch.arange(max(part.end for part in parts), device=logits_XV.device)
    token_XL = token_pool_RL[row_X.long(), : len(position_L)].long()
    is_known_XL = position_L < end_X[:, None]
    token_XL = token_XL.masked_fill(~is_known_XL, 0)  # what is behind the end may be anything
    is_answer_XL = is_known_XL & (position_L >= prompt_X[:, None])
    count_XV = torch.zeros_like(logits_XV).scatter_add_(1, token_XL, is_answer_XL.float())
    seen_XV = torch.zeros_like(logits_XV).scatter_add_(1, token_XL, is_known_XL.float()) > 0
    factor_XV = torch.where(logits_XV > 0, 1 / repetition_X1, repetition_X1)
    logits_XV.copy_(torch.where(seen_XV, logits_XV * factor_XV, logits_XV))
    logits_XV.sub_(frequency_X1 * count_XV + presence_X1 * (count_XV > 0))


_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


class LogprobsOutput:
    """Log probabilities on their way to the host.

    Args:
        index: of the slices that asked, into the sampled tokens.
        logits_XV: theirs, as the model gave them.
        num_top: how many of the likeliest each wants.
    """

    def __init__(
        self, index: list[int], logits_XV: Tensor, token_X: Tensor, num_top: list[int]
    ) -> None:
        self._index, self._num_top = index, num_top
        logprob_XV = torch.log_softmax(logits_XV.float(), dim=-1)
        own_X1 = logprob_XV.gather(1, token_X.long()[:, None])
        top_XC, id_XC = logprob_XV.topk(min(max(num_top), logprob_XV.shape[1]), dim=-1)
        self._own_X, self._top_XC, self._id_XC = (
            x.to("cpu", non_blocking=True) for x in (own_X1[:, 0], top_XC, id_XC)
        )

    def read(self) -> dict[int, TokenLogprobs]:
        """By index of the sampled token; only after the tokens have come."""
        rows = zip(self._own_X.tolist(), self._top_XC.tolist(), self._id_XC.tolist(), strict=True)
        return {
            index: TokenLogprobs(own, list(zip(ids, tops, strict=True))[:count])
            for index, count, (own, tops, ids) in zip(self._index, self._num_top, rows, strict=True)
        }
