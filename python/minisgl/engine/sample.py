"""Logits to tokens, for a whole batch at once.

A token is the argmax of (filtered, scaled) logits plus Gumbel noise, which is the same as sampling from their softmax
(Gumbel 1954; the trick is explained by Maddison et al. 2014, arXiv:1411.0030). The noise is a function of the
request's seed, the position and the token id (`kernel/noise.py`), so a request's tokens depend on nothing else than
its own logits.
"""

# Dimension key: B requests, V vocab, C candidates.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.core import ReqSlice
from minisgl.kernel import gumbel_noise

_FEW_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class BatchSamplingArgs:
    """The sampling parameters of those requests of a batch that are not greedy.

    Attributes:
        index_B: int64, which requests these are, by their place in the batch; the others are greedy.
        temperature_B1, top_p_B1, min_p_B1: float32; 1, 1, 0 where absent.
        top_k_B1: int64; the vocabulary's size where absent.
        seed_B, position_B: int64; the position is that of the token to be chosen.
        filters: whether any of top_k, top_p, min_p is in use.
    """

    index_B: Tensor
    temperature_B1: Tensor
    top_k_B1: Tensor
    top_p_B1: Tensor
    min_p_B1: Tensor
    seed_B: Tensor
    position_B: Tensor
    filters: bool

    @classmethod
    def of(cls, parts: list[ReqSlice], vocab_size: int, device: torch.device) -> BatchSamplingArgs | None:
        """The arguments for slices that sample; None if all are greedy."""
        sampled = [(i, part) for i, part in enumerate(parts) if not part.req.params.is_greedy]
        if not sampled:
            return None
        params = [part.req.params for _, part in sampled]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        return cls(
            index_B=integers([i for i, _ in sampled]),
            temperature_B1=column([p.temperature for p in params]),
            top_k_B1=integers(top_k)[:, None],
            top_p_B1=column([p.top_p for p in params]),
            min_p_B1=column([p.min_p for p in params]),
            seed_B=integers([part.req.seed for _, part in sampled]),
            position_B=integers([part.end for _, part in sampled]),
            filters=any(k < vocab_size or p.top_p < 1 or p.min_p > 0 for k, p in zip(top_k, params, strict=True)),
        )


def sample(logits_BV: Tensor, args: BatchSamplingArgs | None) -> Tensor:
    """Choose one token a request.

    Args:
        logits_BV: float32.
        args: None if every request is greedy.

    Returns:
        int64 [B].
    """
    token_B = logits_BV.argmax(dim=-1)
    if args is not None:
        score_BV = logits_BV[args.index_B]
        score_BV = (score_BV - score_BV.amax(dim=-1, keepdim=True)) / args.temperature_B1.clamp_min(1e-30)
        if args.filters:
            score_BV = score_BV.masked_fill(score_BV < _lowest_kept(score_BV, args), -math.inf)
        score_BV += gumbel_noise(args.seed_B, args.position_B, logits_BV.shape[1])
        token_B[args.index_B] = score_BV.argmax(dim=-1)
    return token_B


def _lowest_kept(score_BV: Tensor, args: BatchSamplingArgs) -> Tensor:
    """The smallest score that top_k, then top_p of what that leaves, and min_p keep: [B, 1]."""
    kept = score_BV.amax(dim=-1, keepdim=True) + args.min_p_B1.log()
    for num_candidates in (_FEW_CANDIDATES, score_BV.shape[1]):  # sorting the vocabulary is rarely needed
        score_BC = score_BV.topk(min(num_candidates, score_BV.shape[1])).values
        rank_C = torch.arange(score_BC.shape[1], device=score_BV.device)
        is_top_k_BC = rank_C < args.top_k_B1
        mass_B1 = _log_mass(score_BV, score_BC, is_top_k_BC, args.top_k_B1)
        share_BC = (score_BC - mass_B1).exp() * is_top_k_BC
        before_BC = share_BC.cumsum(dim=-1) - share_BC
        is_top_p_BC = (before_BC < args.top_p_B1) | (args.top_p_B1 >= 1) | (rank_C == 0)
        is_kept_BC = is_top_k_BC & is_top_p_BC
        needs_more_B1 = is_kept_BC[:, -1:] | ((rank_C[-1] < args.top_k_B1 - 1) & (args.top_k_B1 < score_BV.shape[1]))
        if score_BC.shape[1] == score_BV.shape[1] or not bool(needs_more_B1.any()):
            break
    last_B1 = is_kept_BC.sum(dim=-1, keepdim=True) - 1
    return torch.maximum(kept, score_BC.gather(1, last_B1))


def _log_mass(score_BV: Tensor, score_BC: Tensor, is_top_k_BC: Tensor, top_k_B1: Tensor) -> Tensor:
    """Log of the softmax mass that top_k leaves: of the candidates, or of the whole vocabulary."""
    of_candidates = score_BC.masked_fill(~is_top_k_BC, -math.inf).logsumexp(dim=-1, keepdim=True)
    of_all = score_BV.logsumexp(dim=-1, keepdim=True)
    return torch.where(top_k_B1 > score_BC.shape[1], of_all, of_candidates)
