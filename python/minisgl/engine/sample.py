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

from minisgl.core import SAMPLING, IntArray, ReqSlice, SamplingParams, sampling_numbers
from minisgl.kernel import choose_tokens, lowest_kept
from minisgl.sampling_params import MAX_COUNT
from minisgl.utils.staging import Numbers, Staging

_GREEDY = sampling_numbers(SamplingParams(temperature=0.0), seed=0)


@dataclass(frozen=True, slots=True)
class BatchSamplingArgs:
    """The sampling parameters of a batch, with values that keep everything where a request has no filter.

    Attributes:
        is_filtered: whether to look at the filters.
        is_masked: whether logits have to be masked first.
        temperature_B: float32; 0 is greedy.
        seed_2B: int32, the halves of each 64-bit seed side by side.
        position_B: int32, of the tokens to be chosen.
        mask_B: int32, which of the step's masks applies, counted over the requests that have a grammar; -1: none.
        top_k_B, top_p_B, min_p_B: int32, float32, float32.
    """

    is_filtered: bool
    is_masked: bool
    temperature_B: Tensor
    seed_2B: Tensor
    position_B: Tensor
    mask_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor

    @classmethod
    def of(cls, parts: list[ReqSlice], staging: Staging) -> BatchSamplingArgs:
        """The arguments for slices that sample, from logits that need no mask, or have been masked."""
        arrays = sampling_arrays(parts, np.array([part.end for part in parts], dtype=np.int32))
        return cls(has_filters(arrays), False, *staging.send(*arrays))


def sampling_arrays(parts: list[ReqSlice], end_B: IntArray) -> list[Numbers]:
    """The tensors of `BatchSamplingArgs`, on the host.

    Args:
        end_B: where the slices end; if it is longer, the rest is greedy.
    """
    told = bytearray().join([part.req.packed_sampling for part in parts]) + _GREEDY * (
        len(end_B) - len(parts)
    )
    of_B = np.frombuffer(told, dtype=SAMPLING)
    mask_B = of_B["is_masked"].cumsum(dtype=np.int32) * of_B["is_masked"] - 1
    filters = [of_B[name] for name in ("top_k", "top_p", "min_p")]
    return [of_B["temperature"], of_B["seed"].copy().view(np.int32), end_B, mask_B, *filters]


def has_filters(arrays: list[Numbers]) -> bool:
    """Whether some of the `sampling_arrays` have a filter and are not greedy."""
    temperature_B, *_, top_k_B, top_p_B, min_p_B = arrays
    return bool(
        ((temperature_B > 0) & ((top_k_B < MAX_COUNT) | (top_p_B < 1) | (min_p_B > 0))).any()
    )


def sample(logits_BV: Tensor, args: BatchSamplingArgs) -> Tensor:
    """Choose one token a request, of logits that are masked: int32 [B]."""
    lowest_B = None
    if args.is_filtered:
        lowest_B = lowest_kept(
            logits_BV, args.temperature_B, args.top_k_B, args.top_p_B, args.min_p_B
        )
    return choose_tokens(
        logits_BV, lowest_B, args.temperature_B, args.seed_2B.view(-1, 2), args.position_B
    )
