"""A step between its phases."""

# Dimensions: B requests of a step, V vocabulary.

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core import Req, ReqSlice, SamplingParams
from minisgl.engine import BatchSamplingArgs, LaunchedStep
from minisgl.engine.sampler import SamplingInputs
from minisgl.utils.staging import Staging


@pytest.mark.parametrize("num_slices", [0, 1])
@pytest.mark.parametrize("is_sampling_rank", [False, True])
def test_a_step_has_logits_where_this_rank_samples_something(
    num_slices: int, is_sampling_rank: bool
) -> None:
    """A captured prompt has logits in any case, padding's if the prompt goes on."""
    req = Req(0, np.zeros(1, dtype=np.int32), SamplingParams(), max_length=2, seed=0)
    slices = [ReqSlice(req, 0, 1, samples=True)] * num_slices
    args = BatchSamplingArgs.of(slices, Staging(torch.device("cpu")))
    logits_BV = torch.zeros(1, 8) if is_sampling_rank else None
    token_index_B = torch.zeros(1, dtype=torch.int32)
    launched = LaunchedStep(slices, SamplingInputs(logits_BV, args, token_index_B))
    assert launched.has_logits == (is_sampling_rank and num_slices > 0)
