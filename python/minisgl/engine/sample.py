"""Logits to tokens, for a whole batch at once.

A token is the argmax of (filtered) logits plus temperature times Gumbel noise, which is the same as sampling from the
softmax of logits / temperature (Gumbel 1954; the trick is explained by Maddison et al. 2014, arXiv:1411.0030). The
noise is a function of the request's seed, the position and the token id (`kernel/noise.py`), so a request's tokens
depend on nothing else than its own logits.
"""

# Dimension key: B requests, V vocab.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minisgl.core import ReqSlice
from minisgl.kernel import choose_tokens, lowest_kept
from minisgl.utils.staging import Staging


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
    filters, lowest_B = args.filters, None
    if filters is not None:
        lowest_B = lowest_kept(logits_BV, args.temperature_B, filters.top_k_B, filters.top_p_B, filters.min_p_B)
    return choose_tokens(logits_BV, lowest_B, args.temperature_B, args.seed_B2, args.position_B)
