"""What top_k, top_p and min_p leave of the vocabulary: all tokens from some logit on.

Sorted logits say which (the reference); a GPU counts values instead (csrc/filters.cu).
"""

# Dimension key: B requests, V vocab, C candidates.

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.kernel.dispatch import cuda_kernels_for

_FEW_CANDIDATES = 1024


def lowest_kept(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:
    """The smallest logit that top_k, then top_p of what that leaves, and min_p keep; ties at a border are kept.

    Of bfloat16 logits on a GPU, those nearer to 0 than 2^-15 count as 0, and those of 2^12 and more as equal.

    Args:
        logits_BV: stride(1) == 1.
        temperature_B, top_p_B, min_p_B: float32. Where the temperature is 0 the result means nothing.
        top_k_B: int32. Without a filter: top_k >= V, top_p = 1, min_p = 0.

    Returns:
        float32 [B].
    """
    kernels = cuda_kernels_for(logits_BV)
    if kernels is None:
        return lowest_kept_reference(logits_BV.float(), temperature_B, top_k_B, top_p_B, min_p_B)
    lowest_B = torch.empty_like(temperature_B)
    kernels.lowest_kept(logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, lowest_B)
    return lowest_B


def lowest_kept_reference(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> Tensor:
    """The same, of float32 logits, with torch's operators."""
    temperature_B1 = temperature_B[:, None].clamp_min(1e-30)
    top_B1 = logits_BV.amax(dim=-1, keepdim=True)
    score_BV = (logits_BV - top_B1) / temperature_B1
    top_k_B1, top_p_B1 = top_k_B[:, None], top_p_B[:, None]
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
    by_min_p_B1 = torch.where(min_p_B[:, None] > 0, min_p_B[:, None].log(), -math.inf)
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
