"""The sampling parameters of a batch: the numbers that say how each request's token is chosen.

    SamplingParams        of a request, as the client gave them
    Req.sampling_record   the same and its seed as bytes, packed once
    SamplingArrays        those of a step's slices, on the host
    BatchSamplingArgs     the same on the device
    SamplingInputs        with the logits, and where the tokens go (`sampler.py`)

Next to read: `sampler.py`.
"""

# Dimensions: B requests of a step, or of a captured graph, Z entries of a flat list.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minisgl.core import IntArray, ReqSlice, SamplingParams
from minisgl.sampling_params import MAX_COUNT, SAMPLING_DTYPE, pack_sampling
from minisgl.utils.staging import Staging, capacity_for

FloatArray = NDArray[np.float32]
_GREEDY = pack_sampling(SamplingParams(temperature=0.0), seed=0)


@dataclass(frozen=True, slots=True)
class BatchSamplingArgs:
    """The sampling parameters of a batch. Where a request has no filter, they keep every token.

    Attributes:
        is_filtered: whether to look at the filters.
        is_masked: whether logits have to be masked first.
        temperature_B: float32; 0 is greedy.
        seed_Z: int32, two for each request: the halves of its 64-bit seed, side by side.
        position_B: int32, of the tokens to be chosen.
        mask_B: int32, which of the step's masks applies, counted over the requests that have a
            grammar; -1: none.
        top_k_B, top_p_B, min_p_B: int32, float32, float32.
    """

    is_filtered: bool
    is_masked: bool
    temperature_B: Tensor
    seed_Z: Tensor
    position_B: Tensor
    mask_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor

    @classmethod
    def of(cls, slices: list[ReqSlice], staging: Staging) -> BatchSamplingArgs:
        """The arguments for slices that sample from logits that need no mask any more."""
        end_B = np.array([req_slice.end for req_slice in slices], dtype=np.int32)
        arrays = sampling_arrays(slices, end_B)
        return cls(has_filters(arrays), False, *staging.send(*arrays))


class SamplingArrays(NamedTuple):
    """The tensors of `BatchSamplingArgs` on the host, in the same order."""

    temperature_B: FloatArray
    seed_Z: IntArray
    position_B: IntArray
    mask_B: IntArray
    top_k_B: IntArray
    top_p_B: FloatArray
    min_p_B: FloatArray


def sampling_arrays(slices: list[ReqSlice], end_B: IntArray) -> SamplingArrays:
    """What goes to the device for slices that sample.

    Args:
        end_B: where the slices end; if it is longer, the rest is padding, which is greedy.
    """
    packed = bytearray().join([req_slice.req.sampling_record for req_slice in slices])
    packed += _GREEDY * (len(end_B) - len(slices))
    numbers_B = np.frombuffer(packed, dtype=SAMPLING_DTYPE)
    is_masked_B = numbers_B["is_masked"]
    return SamplingArrays(
        temperature_B=numbers_B["temperature"],
        seed_Z=numbers_B["seed"].copy().view(np.int32),
        position_B=end_B,
        mask_B=is_masked_B.cumsum(dtype=np.int32) * is_masked_B - 1,
        top_k_B=numbers_B["top_k"],
        top_p_B=numbers_B["top_p"],
        min_p_B=numbers_B["min_p"],
    )


def sampling_capacity(num_slices: int) -> int:
    """The capacity of a staging that sends the arrays of `num_slices`."""
    num_arrays = len(SamplingArrays._fields)
    two_numbers_a_seed = capacity_for(2 * num_slices)
    return num_arrays * capacity_for(num_slices) + two_numbers_a_seed


def has_masks(arrays: SamplingArrays) -> bool:
    """Whether a request has a grammar."""
    return bool((arrays.mask_B >= 0).any())


def has_filters(arrays: SamplingArrays) -> bool:
    """Whether a request has a filter and is not greedy."""
    is_random_B = arrays.temperature_B > 0
    if not is_random_B.any():
        return False
    has_filter_B = (arrays.top_k_B < MAX_COUNT) | (arrays.top_p_B < 1) | (arrays.min_p_B > 0)
    return bool((is_random_B & has_filter_B).any())
