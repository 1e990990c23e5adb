"""Changes the logits of some requests before their tokens are chosen: bias, bans, penalties.

Only the rows of those requests are touched, in copies of float32. Each rank changes the logits of
its own tokens. How often a token has occurred is counted on the device, in the token pool. So
nothing has to wait until the host has the tokens of the step before.
"""

# Dimensions: L positions of a sequence, R rows of the tables, V vocabulary, X a selection out of
# another dimension, Z entries of a flat list.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.core import ReqSlice
from minisgl.sampling_params import MAX_BIASES, MAX_STOPS
from minisgl.utils.staging import Numbers, Staging, capacity_for

# Below all logits. A grammar's mask is lower still, so that an answer ends where the grammar allows
# nothing else.
_BAN = -1e9
# A repetition penalty below makes no other choice, but logits that it divides could be infinite.
_LEAST_REPETITION = 1e-25


def processing_capacity(num_slices: int, num_eos: int) -> int:
    """The capacity of a staging that sends what changes the logits of `num_slices`."""
    num_biases = num_slices * (MAX_BIASES + MAX_STOPS + num_eos)
    return max(3 * capacity_for(num_biases), 6 * capacity_for(num_slices))


def wants_processing(req_slice: ReqSlice) -> bool:
    """Whether its token is to be chosen from other logits than the model's."""
    return req_slice.req.params.changes_logits or _is_too_short(req_slice)


def process_logits(
    logits_XV: Tensor,
    slices: list[ReqSlice],
    token_pool_RL: Tensor,
    eos_ids: frozenset[int],
    shard: range,
    staging: Staging,
) -> None:
    """Apply bias, bans and penalties of the slices to their rows, in place.

    Args:
        shard: the tokens of the first columns; there may be more columns.
    """
    _add_biases(logits_XV, slices, eos_ids, shard, staging)
    if any(req_slice.req.params.has_penalty for req_slice in slices):
        _penalize(logits_XV, slices, token_pool_RL, shard, staging)


def _add_biases(
    logits_XV: Tensor,
    slices: list[ReqSlice],
    eos_ids: frozenset[int],
    shard: range,
    staging: Staging,
) -> None:
    """Add logit biases, and bans, which are biases that outweigh every logit."""
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for x, req_slice in enumerate(slices):
        biases = list(req_slice.req.params.logit_bias.items())
        biases += [(token, _BAN) for token in _banned_tokens(req_slice, eos_ids)]
        for token, value in biases:
            if token in shard:
                rows.append(x)
                columns.append(token - shard.start)
                values.append(value)
    if not rows:
        return
    row_Z, column_Z, value_Z = staging.send(
        np.array(rows, dtype=np.int32),
        np.array(columns, dtype=np.int32),
        np.array(values, dtype=np.float32),
    )
    logits_XV.index_put_((row_Z.long(), column_Z.long()), value_Z, accumulate=True)


def _banned_tokens(req_slice: ReqSlice, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that would end an answer too early.

    An end of sequence is one of them even if it is ignored: it would still end a complete match.
    """
    if not _is_too_short(req_slice):
        return frozenset()
    return eos_ids.union(req_slice.req.params.stop_token_ids)


def _is_too_short(req_slice: ReqSlice) -> bool:
    return req_slice.end - req_slice.req.num_prompt < req_slice.req.params.min_tokens


def _penalize(
    logits_XV: Tensor,
    slices: list[ReqSlice],
    token_pool_RL: Tensor,
    shard: range,
    staging: Staging,
) -> None:
    row_X, prompt_X, end_X, presence_X, frequency_X, repetition_X = staging.send(
        *_penalty_arrays(slices)
    )

    # The tokens of each request so far, as columns. What follows the end of a row may be anything.
    position_L = torch.arange(max(req_slice.end for req_slice in slices), device=logits_XV.device)
    column_XL = token_pool_RL[row_X.long(), : len(position_L)].long() - shard.start
    is_here_XL = (column_XL >= 0) & (column_XL < len(shard))
    is_known_XL = is_here_XL & (position_L < end_X[:, None])
    is_answer_XL = is_known_XL & (position_L >= prompt_X[:, None])
    column_XL.masked_fill_(~is_known_XL, 0)

    # How often each token stands in the answer, and whether in prompt or answer.
    count_XV = torch.zeros_like(logits_XV).scatter_add_(1, column_XL, is_answer_XL.float())
    seen_XV = torch.zeros_like(logits_XV).scatter_add_(1, column_XL, is_known_XL.float()) > 0

    # A small factor would bring a ban back among the logits.
    repetition_X1 = repetition_X[:, None]
    factor_XV = torch.where(logits_XV > 0, 1 / repetition_X1, repetition_X1)
    is_changed_XV = seen_XV & (logits_XV > _BAN / 2)
    logits_XV.copy_(torch.where(is_changed_XV, logits_XV * factor_XV, logits_XV))
    logits_XV.sub_(frequency_X[:, None] * count_XV + presence_X[:, None] * (count_XV > 0))


def _penalty_arrays(slices: list[ReqSlice]) -> list[Numbers]:
    """Rows, prompt lengths, ends; then presence, frequency and repetition penalties."""
    params = [req_slice.req.params for req_slice in slices]
    return [
        np.array([req_slice.row for req_slice in slices], dtype=np.int32),
        np.array([req_slice.req.num_prompt for req_slice in slices], dtype=np.int32),
        np.array([req_slice.end for req_slice in slices], dtype=np.int32),
        np.array([p.presence_penalty for p in params], dtype=np.float32),
        np.array([p.frequency_penalty for p in params], dtype=np.float32),
        np.array([max(p.repetition_penalty, _LEAST_REPETITION) for p in params], dtype=np.float32),
    ]
