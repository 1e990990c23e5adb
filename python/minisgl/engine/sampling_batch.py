"""The sampling parameters of a batch: the numbers that say how each request's token is chosen.

    SamplingParams        of a request, as the client gave them
    Req.sampling_record   the same and its seed as bytes, packed once
    SamplingNumbers       those of a step's slices, on the host or on the device
    SamplingInputs        with the logits, and where the tokens go (`sampler.py`)

Next to read: `sampler.py`.
"""

# Dimensions: B requests of a step, or of a captured graph, Z entries of a flat list.

from __future__ import annotations

from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from minisgl.core import IntArray, ReqSlice, SamplingParams
from minisgl.sampling_params import MAX_COUNT, SAMPLING_DTYPE, pack_sampling
from minisgl.utils.staging import Numbers, Staging, capacity_for

ItemT = TypeVar("ItemT")  # an array on the host, or a tensor on the device
_GREEDY = pack_sampling(SamplingParams(temperature=0.0), seed=0)


class SamplingNumbers(NamedTuple, Generic[ItemT]):
    """How the tokens of a batch are chosen. Where a request has no filter, they keep every token.

    Attributes:
        temperature_B: float32; 0 is greedy.
        seed_Z: int32, two for each request: the halves of its 64-bit seed, side by side.
        position_B: int32, of the tokens to be chosen.
        mask_B: int32, which of the step's masks applies, counted over the requests that have a
            grammar; -1: none.
        top_k_B, top_p_B, min_p_B: int32, float32, float32.
    """

    temperature_B: ItemT
    seed_Z: ItemT
    position_B: ItemT
    mask_B: ItemT
    top_k_B: ItemT
    top_p_B: ItemT
    min_p_B: ItemT


SamplingArrays: TypeAlias = SamplingNumbers[Numbers]


def sampling_arrays(slices: list[ReqSlice], end_B: IntArray) -> SamplingArrays:
    """The numbers of slices that sample, on the host.

    Args:
        end_B: where the slices end; if it is longer, the rest is padding, which is greedy.
    """
    packed = bytearray().join([req_slice.req.sampling_record for req_slice in slices])
    packed += _GREEDY * (len(end_B) - len(slices))
    numbers_B = np.frombuffer(packed, dtype=SAMPLING_DTYPE)
    is_masked_B = numbers_B["is_masked"]
    return SamplingNumbers(
        temperature_B=numbers_B["temperature"],
        seed_Z=numbers_B["seed"].copy().view(np.int32),
        position_B=end_B,
        mask_B=is_masked_B.cumsum(dtype=np.int32) * is_masked_B - 1,
        top_k_B=numbers_B["top_k"],
        top_p_B=numbers_B["top_p"],
        min_p_B=numbers_B["min_p"],
    )


def send_sampling(slices: list[ReqSlice], staging: Staging) -> tuple[SamplingNumbers[Tensor], bool]:
    """The numbers of slices that sample, on the device, and whether to look at the filters."""
    end_B = np.array([req_slice.end for req_slice in slices], dtype=np.int32)
    arrays = sampling_arrays(slices, end_B)
    return SamplingNumbers(*staging.send(*arrays)), has_filters(arrays)


def sampling_capacity(num_slices: int) -> int:
    """The capacity of a staging that sends the arrays of `num_slices`."""
    num_arrays = len(SamplingNumbers._fields)
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
