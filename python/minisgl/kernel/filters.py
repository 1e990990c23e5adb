"""The filters top_k, top_p and min_p: together they keep the tokens whose logits reach a threshold.

The reference finds the threshold by sorting the likeliest tokens. A GPU counts values instead of
sorting them (csrc/filters.cu); a CPU counts the logits above a number (csrc/cpu_sample.cpp).
"""

# Dimensions: B requests of a step, C candidates: the likeliest tokens, V vocabulary.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cpu_kernels_for, cuda_kernels_for

_FEW_CANDIDATES = 1024


def lowest_kept(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:
    """Return the smallest logit that top_k, then top_p of what top_k leaves, and min_p keep.

    Tokens that tie with it are kept. For bfloat16 logits on a GPU, those nearer to 0 than 2^-15
    count as 0, and those of 2^12 and more count as equal.

    Args:
        logits_BV: stride(1) == 1.
        temperature_B, top_p_B, min_p_B: float32. A temperature of 0 makes the result meaningless.
        top_k_B: int32. Without a filter: top_k >= V, top_p = 1, min_p = 0.

    Returns:
        lowest_B: float32.
    """
    kernels = _kernels_for(logits_BV)
    if kernels is None:
        return lowest_kept_reference(logits_BV.float(), temperature_B, top_k_B, top_p_B, min_p_B)
    lowest_B = torch.empty_like(temperature_B)
    kernels.lowest_kept(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, lowest_B)
    return lowest_B


def has_filter_kernels(x: Tensor) -> bool:
    """Whether `lowest_kept` is one kernel, for logits like this tensor."""
    return _kernels_for(x) is not None


def _kernels_for(x: Tensor) -> Any | None:
    return cuda_kernels_for(x) or cpu_kernels_for(x)


def lowest_kept_reference(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:
    """Compute what `lowest_kept` does, in plain torch, for float32 logits."""
    temperature_B1 = temperature_B[:, None].clamp_min(1e-30)
    top_B1 = logits_BV.amax(dim=-1, keepdim=True)
    score_BV = (logits_BV - top_B1) / temperature_B1
    last_B1 = _last_kept_logit(logits_BV, score_BV, top_k_B[:, None], top_p_B[:, None])
    least_score_B1 = torch.where(min_p_B[:, None] > 0, min_p_B[:, None].log(), -math.inf)
    kept_BV = torch.where(score_BV >= least_score_B1, logits_BV, math.inf)
    return torch.maximum(kept_BV.amin(dim=-1, keepdim=True), last_B1).flatten()


def _last_kept_logit(
    logits_BV: Tensor, score_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor
) -> Tensor:
    """Return the smallest logit that top_k, then top_p, keep: [B, 1]."""
    vocab_size = score_BV.shape[1]
    for num_candidates in _nums_of_candidates(score_BV):
        score_BC, id_BC = score_BV.topk(num_candidates)
        rank_C = torch.arange(num_candidates, device=score_BV.device)
        is_top_k_BC = rank_C < top_k_B1
        log_mass_B1 = _log_mass(score_BV, score_BC, is_top_k_BC, top_k_B1)
        probability_BC = (score_BC - log_mass_B1).exp() * is_top_k_BC
        before_BC = probability_BC.cumsum(dim=-1) - probability_BC
        is_kept_BC = is_top_k_BC & ((before_BC < top_p_B1) | (top_p_B1 >= 1) | (rank_C == 0))
        needs_more_B1 = is_kept_BC[:, -1:] | ((num_candidates < top_k_B1) & (top_k_B1 < vocab_size))
        if num_candidates == vocab_size or not bool(needs_more_B1.any()):
            break
    last_B1 = is_kept_BC.sum(dim=-1, keepdim=True) - 1
    return logits_BV.gather(1, id_BC.gather(1, last_B1))


def _nums_of_candidates(score_BV: Tensor) -> list[int]:
    """Return how many candidates to sort, and how many if those do not suffice.

    A CPU tries a few first, which mostly suffice. A GPU sorts all: to look at the result would make
    the host wait for the device.
    """
    vocab_size = score_BV.shape[1]
    if score_BV.is_cuda:
        return [vocab_size]
    return [min(_FEW_CANDIDATES, vocab_size), vocab_size]


def _log_mass(score_BV: Tensor, score_BC: Tensor, is_top_k_BC: Tensor, top_k_B1: Tensor) -> Tensor:
    """Return the log of the softmax mass that top_k leaves, [B, 1].

    It is the mass of the candidates, or of the whole vocabulary where top_k exceeds their number.
    """
    candidates_B1 = score_BC.masked_fill(~is_top_k_BC, -math.inf).logsumexp(dim=-1, keepdim=True)
    vocabulary_B1 = score_BV.logsumexp(dim=-1, keepdim=True)
    return torch.where(top_k_B1 > score_BC.shape[1], vocabulary_B1, candidates_B1)
