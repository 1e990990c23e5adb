"""Logits to tokens, for a whole batch at once.

A token is the argmax of (filtered) logits plus temperature times Gumbel noise, which is the same as sampling from the
softmax of logits / temperature (Gumbel 1954; the trick is explained by Maddison et al. 2014, arXiv:1411.0030). The
noise is a function of the request's seed, the position and the token id (`kernel/noise.py`), so a request's tokens
depend on nothing else than its own logits.
"""

# Dimension key: B requests, V vocab, C candidates.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.core import ReqSlice
from minisgl.kernel import choose_tokens
from minisgl.utils import Staging

_FEW_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a batch, with values that keep everything where a request has none: int32, float32, float32."""

    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor


@dataclass(frozen=True, slots=True)
class BatchSamplingArgs:
    """The sampling parameters of a batch.

    Attributes:
        temperature_B: float32; 0 is greedy.
        seed_B2: int32, the halves of a 64-bit seed.
        position_B: int32, of the tokens to be chosen.
        filters: None if no request has any.
    """

    temperature_B: Tensor
    seed_B2: Tensor
    position_B: Tensor
    filters: Filters | None

    @classmethod
    def of(cls, parts: list[ReqSlice], vocab_size: int, staging: Staging) -> BatchSamplingArgs:
        """The arguments for slices that sample."""
        params = [part.req.params for part in parts]
        temperature_B = np.array([p.temperature for p in params], dtype=np.float32)
        seed_2B = np.array([part.req.seed for part in parts], dtype=np.int64).view(np.int32)
        position_B = np.array([part.end for part in parts], dtype=np.int32)
        top_k_B = np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int32)
        top_p_B = np.array([p.top_p for p in params], dtype=np.float32)
        min_p_B = np.array([p.min_p for p in params], dtype=np.float32)
        is_filtered_B = (temperature_B > 0) & ((top_k_B < vocab_size) | (top_p_B < 1) | (min_p_B > 0))
        if not is_filtered_B.any():
            temperature, seed, position = staging.send(temperature_B, seed_2B, position_B)
            return cls(temperature, seed.view(-1, 2), position, None)
        temperature, seed, position, *filters = staging.send(
            temperature_B, seed_2B, position_B, top_k_B, top_p_B, min_p_B
        )
        return cls(temperature, seed.view(-1, 2), position, Filters(*filters))


def sample(logits_BV: Tensor, args: BatchSamplingArgs) -> Tensor:
    """Choose one token a request: int32 [B]."""
    lowest_B = None if args.filters is None else _lowest_kept(logits_BV.float(), args.temperature_B, args.filters)
    return choose_tokens(logits_BV, lowest_B, args.temperature_B, args.seed_B2, args.position_B)


def _lowest_kept(logits_BV: Tensor, temperature_B: Tensor, filters: Filters) -> Tensor:
    """The smallest logit that top_k, then top_p of what that leaves, and min_p keep; ties at a border are kept."""
    temperature_B1 = temperature_B[:, None].clamp_min(1e-30)
    top_B1 = logits_BV.amax(dim=-1, keepdim=True)
    score_BV = (logits_BV - top_B1) / temperature_B1
    top_k_B1, top_p_B1 = filters.top_k_B[:, None], filters.top_p_B[:, None]
    vocab_size = score_BV.shape[1]
    for num_candidates in _candidates(score_BV):
        score_BC, id_BC = score_BV.topk(num_candidates)
        rank_C = torch.arange(num_candidates, device=score_BV.device)
        is_top_k_BC = rank_C < top_k_B1
        mass_B1 = _log_mass(score_BV, score_BC, is_top_k_BC, top_k_B1)
        share_BC = (score_BC - mass_B1).exp() * is_top_k_BC
        before_BC = share_BC.cumsum(dim=-1) - share_BC
        is_kept_BC = is_top_k_BC & ((before_BC < top_p_B1) | (top_p_B1 >= 1) | (rank_C == 0))
        needs_more_B1 = is_kept_BC[:, -1:] | ((num_candidates < top_k_B1) & (top_k_B1 < vocab_size))
        if num_candidates == vocab_size or not bool(needs_more_B1.any()):
            break
    last_B1 = is_kept_BC.sum(dim=-1, keepdim=True) - 1
    by_min_p_B1 = torch.where(filters.min_p_B[:, None] > 0, filters.min_p_B[:, None].log(), -math.inf)
    is_in_min_p_BV = score_BV >= by_min_p_B1
    by_min_p_B1 = torch.where(is_in_min_p_BV, logits_BV, math.inf).amin(dim=-1, keepdim=True)
    return torch.maximum(by_min_p_B1, logits_BV.gather(1, id_BC.gather(1, last_B1))).flatten()


def _candidates(score_BV: Tensor) -> list[int]:
    """How many to look at: on a CPU a few first, which mostly suffices; a GPU is not to be waited for."""
    vocab_size = score_BV.shape[1]
    return [vocab_size] if score_BV.is_cuda else [min(_FEW_CANDIDATES, vocab_size), vocab_size]


def _log_mass(score_BV: Tensor, score_BC: Tensor, is_top_k_BC: Tensor, top_k_B1: Tensor) -> Tensor:
    """Log of the softmax mass that top_k leaves: of the candidates, or of the whole vocabulary."""
    of_candidates = score_BC.masked_fill(~is_top_k_BC, -math.inf).logsumexp(dim=-1, keepdim=True)
    of_all = score_BV.logsumexp(dim=-1, keepdim=True)
    return torch.where(top_k_B1 > score_BC.shape[1], of_all, of_candidates)
