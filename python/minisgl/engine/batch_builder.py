"""From a plan to a `Batch`, for eager steps.

All numbers of the step go to the device in one copy.
"""

# Dimensions: B requests of a step, L positions of a sequence, P pages, R rows of the tables,
# T tokens of a step, V vocabulary, X a selection out of another dimension, Y tokens whose hidden
# states are returned.

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from minisgl.core import Batch, BatchPlan, Queries, Req, ReqSlice, SamplingParams
from minisgl.engine.sampler import SamplingInputs
from minisgl.engine.sampling_batch import (
    SamplingNumbers,
    has_filters,
    has_masks,
    sampling_arrays,
    sampling_capacity,
)
from minisgl.engine.slice_tokens import SliceTokens
from minisgl.kernel import look_up
from minisgl.layers import Context
from minisgl.utils.staging import Staging, capacity_for

_MULTIPLE_ON_GPU = 64  # tiles of products are as long or longer
_FEWEST_PADDED = 256  # tokens; shorter products have tiles of their own


class BatchBuilder:
    """Builds batches over the tables of a context."""

    def __init__(self, context: Context, staging: Staging, padding: EagerPadding) -> None:
        self._context = context
        self._staging = staging
        self._padding = padding
        self._num_row_tokens = context.token_pool_RL.shape[1]

    def build(self, plan: BatchPlan) -> tuple[Batch, SamplingInputs]:
        """Build the batch of a plan, whose table writes are done already.

        Returns:
            the batch, and how its slices sample from logits that are still to be computed.
        """
        plan = self._padding.pad(plan)

        # The slices: row, start, end, and whether it samples.
        numbers = [
            (req_slice.row, req_slice.start, req_slice.end, req_slice.samples)
            for req_slice in plan.slices
        ]
        rows, starts, ends, samples = np.array(numbers, dtype=np.int32).T
        is_sampling = samples > 0
        tokens = SliceTokens.of(rows, starts, ends)

        # The slices that sample: where the token goes, and how it is chosen.
        sampling_ends = ends[is_sampling]
        sampled_index = rows[is_sampling] * self._num_row_tokens + sampling_ends
        sampling = sampling_arrays(plan.sampling_slices, sampling_ends)

        # The tokens whose hidden states are returned: one at least, also if no slice samples.
        is_returned = is_sampling.copy()
        is_returned[-1] |= not is_sampling.any()
        returned_rows = rows[is_returned]
        returned_positions = ends[is_returned] - 1
        returned_index = tokens.last_X[is_returned]

        # To the device, in one copy.
        row_T, position_T, row_Y, position_Y, index_Y, sampled_index_B, *rest = self._staging.send(
            tokens.row_T,
            tokens.position_T,
            returned_rows,
            returned_positions,
            returned_index,
            sampled_index,
            *sampling,
        )
        input_ids_T, slot_T = look_up(
            row_T,
            position_T,
            self._context.token_pool_RL,
            self._context.page_table_RP,
            self._context.kv_pool.page_size,
        )
        make_metadata = self._context.attn_backend.make_metadata
        queries = Queries(row_T, position_T, make_metadata(plan))
        batch = Batch(input_ids_T, position_T, slot_T, queries)
        if not plan.returns_all and len(index_Y) < len(row_T):
            returning = plan.sampling_slices or plan.slices[-1:]
            metadata = make_metadata(BatchPlan([each.last_token for each in returning]))
            batch = replace(batch, returned=Queries(row_Y, position_Y, metadata, index_Y))
        sampling_inputs = SamplingInputs(
            logits_BV=None,
            numbers=SamplingNumbers(*rest),
            sampled_index_B=sampled_index_B,
            is_filtered=has_filters(sampling),
            is_masked=has_masks(sampling),
        )
        return batch, sampling_inputs


def index_of_sampling(plan: BatchPlan) -> list[int]:
    """Among all tokens of a step, those after which a slice samples."""
    ends = accumulate(map(len, plan.slices))
    return [end - 1 for end, req_slice in zip(ends, plan.slices, strict=True) if req_slice.samples]


def eager_multiple(device: torch.device) -> int:
    """The number to a multiple of which the tokens of a long step are padded.

    On a GPU, cuBLAS chooses a kernel for each new number of tokens, loads it, and keeps the choice.
    """
    return _MULTIPLE_ON_GPU if device.type == "cuda" else 1


class EagerPadding:
    """Padding behind the slices of a long step with prompts: a slice of the padding row.

    Steps of decodes alone have few sizes, and need no attention of prompts.

    Args:
        multiple: the number of tokens is padded to a multiple of this.
        longest: the most tokens of padding. A step that needs more is not padded.
    """

    def __init__(self, padding_row: int, multiple: int, longest: int) -> None:
        self._multiple = multiple
        self._longest = longest
        nothing = np.zeros(1, dtype=np.int32)
        self._req = Req(-1, nothing, SamplingParams(), max_length=1, seed=0)
        self._req.row = padding_row

    def padded(self, num_tokens: int) -> int:
        """How many tokens a step of `num_tokens` has with its padding."""
        missing = -num_tokens % self._multiple
        if num_tokens <= _FEWEST_PADDED or missing > self._longest:
            return num_tokens
        return num_tokens + missing

    def pad(self, plan: BatchPlan) -> BatchPlan:
        num_tokens = plan.num_tokens
        missing = self.padded(num_tokens) - num_tokens
        if not missing or plan.num_decodes == len(plan.slices):
            return plan
        return replace(plan, slices=[*plan.slices, ReqSlice(self._req, 0, missing, samples=False)])


def batch_capacity(num_tokens: int, num_slices: int) -> int:
    """The capacity of a staging that sends a step."""
    of_slices = 4 * capacity_for(num_slices) + sampling_capacity(num_slices)
    return 2 * capacity_for(num_tokens) + of_slices
