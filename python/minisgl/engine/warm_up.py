"""The warm-up of a GPU engine: the steps that it runs before it serves.

Whatever a step does for the first time takes long: a kernel is compiled, or read from a file and
sent to the device; a library makes its plans; memory is allocated on the device. All streams would
stand still meanwhile. Captured steps are replayed once when they are captured. This file has what
runs eagerly:

    run_warm_up      runs both of these
    warm_up_plans    few whole steps: the largest, small ones with more prompts than are captured
    warm_up_samples  tokens sampled from logits alone, with every sampling parameter

A library may have a kernel for few tokens and another for many. Triton's kernels have the same
variants whatever the numbers are (`kernel/gpu/`). Whole steps take the host tens of milliseconds
each, so they are few, and what needs no model is done without it.
"""

# Dimensions: B requests of a step, D model width.

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from minisgl.config import EngineConfig
from minisgl.core import (
    FEWEST_IN_GROUP,
    BatchPlan,
    Grammar,
    PrefixGroup,
    Req,
    ReqSlice,
    RowCopy,
    SamplingParams,
    TableWrites,
)
from minisgl.engine.graphs.sizes import MAX_PROMPTS
from minisgl.engine.limits import EngineLimits
from minisgl.engine.memory import reserve_pinned_memory
from minisgl.engine.model_loader import LoadedModel
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampled_step import SampledStep
from minisgl.engine.sampler import SamplingInputs
from minisgl.engine.sampling_batch import sampling_capacity, send_sampling
from minisgl.engine.steps import LaunchedStep
from minisgl.moe import expert_shape
from minisgl.utils.staging import Staging

logger = logging.getLogger(__name__)

# Tokens of each prompt where there are too many prompts for a captured step: kernels of attention
# are made for up to 16 queries, and up to 64.
_TOKENS_OF_MANY_PROMPTS = (3, 20)
# Tokens of prompts alone in their step.
_TOKENS_OF_LONE_PROMPTS = (16, 400)
# Requests whose logits are changed, 32 at a time. Torch sorts few rows otherwise than many.
_NUMS_OF_SAMPLES = (1, 12, 40)

_PLAIN = SamplingParams()
_SCORED = SamplingParams(prompt_logprobs=1)
_EMBEDDED = SamplingParams(embeds=True, max_tokens=0)
_RESTRICTED = SamplingParams(grammar=Grammar("regex", "a"))  # every mask allows all tokens yet
_CHANGED = SamplingParams(
    presence_penalty=1.0,
    frequency_penalty=1.0,
    repetition_penalty=1.5,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=1,
)
_CHANGED_AND_FILTERED = replace(_CHANGED, top_k=10, top_p=0.9, min_p=0.01)


def run_warm_up(runner: ModelRunner, config: EngineConfig, loaded: LoadedModel) -> None:
    """Do everything that no later step should do for the first time.

    What it writes lies in the padding page, and in the token pool where requests will write.
    """
    started = time.monotonic()
    if loaded.device.type == "cuda":
        reserve_pinned_memory()
    shape = expert_shape(loaded.config, loaded.comm.info, loaded.dtype)
    nums_of_tokens: list[int] = []
    if shape is not None:
        nums_of_tokens = runner.context.moe_backend.nums_of_tokens(shape.num_experts, shape.each)
    num_steps = 0
    for plan in warm_up_plans(config, runner.limits, nums_of_tokens):
        if not runner.captures(plan):
            _read(runner.sample(runner.launch(runner.prepare(plan))))
            num_steps += 1
    staging = Staging(loaded.device, sampling_capacity(max(_NUMS_OF_SAMPLES)))
    for slices in warm_up_samples(runner.limits):
        _read(runner.sample(_launch_without_model(slices, runner.limits, loaded, staging)))
    logger.debug("%d steps of the warm-up in %.2f s", num_steps, time.monotonic() - started)


@torch.inference_mode()
def _launch_without_model(
    slices: list[ReqSlice], limits: EngineLimits, loaded: LoadedModel, staging: Staging
) -> LaunchedStep:
    """Launch a step of slices that sample; their hidden states are zero."""
    token_index = [req_slice.row * limits.num_row_tokens + req_slice.end for req_slice in slices]
    hidden_BD = torch.zeros(
        len(slices), loaded.config.width, dtype=loaded.dtype, device=loaded.device
    )
    numbers, is_filtered = send_sampling(slices, staging)
    inputs = SamplingInputs(
        loaded.model.logits(hidden_BD),
        numbers,
        torch.tensor(token_index, dtype=torch.int32, device=loaded.device),
        is_filtered=is_filtered,
        is_masked=False,
    )
    return LaunchedStep(slices, inputs)


def _read(sampled: SampledStep) -> None:
    """Wait for all that a step gives."""
    sampled.wait()
    sampled.logprobs()
    sampled.prompt_logprobs()
    sampled.embeddings()


def warm_up_plans(
    config: EngineConfig, limits: EngineLimits, nums_of_tokens: Sequence[int] = ()
) -> list[BatchPlan]:
    """Steps to be run once, the largest first: the memory it takes serves the others.

    Those that a captured step takes are among them.

    Args:
        nums_of_tokens: for which experts have a kernel each.
    """
    assert config.max_prefill_length
    num_rows = limits.num_rows
    budget = config.max_prefill_length
    many = range(min(MAX_PROMPTS + 1, num_rows, budget))
    others = range(num_rows)[len(many) :]
    plans = [largest_step(config, limits), _largest_continued(config, limits)]
    for most_tokens in _TOKENS_OF_MANY_PROMPTS:
        num_tokens = min(most_tokens, budget // len(many))
        plans.append(_plan(limits, (), many, 0, num_tokens, (_SCORED, _EMBEDDED, _RESTRICTED)))
        plans.append(_plan(limits, others[:1], many, 1, num_tokens))
    longest = min(budget, limits.max_seq_len)
    lone = {min(size, longest) for size in (*_TOKENS_OF_LONE_PROMPTS, *nums_of_tokens)}
    for num_tokens in sorted(lone):
        plans.append(_plan(limits, (), range(1), 0, num_tokens))
    for num_decodes in (1, num_rows):
        plans.append(_plan(limits, range(num_decodes), (), 0, 0))
    return plans


def largest_step(config: EngineConfig, limits: EngineLimits) -> BatchPlan:
    """The step that takes most memory; it also runs before the pool is sized.

    It has as many prompt tokens as a step may have, all other requests decode and share a prefix,
    and each has the sampling parameters that take memory.
    """
    assert config.max_prefill_length
    params = SamplingParams(top_p=0.9, presence_penalty=1.0, logprobs=1)
    num_shared = limits.page_size if limits.page_size < limits.max_seq_len else 0
    decodes: list[ReqSlice] = []
    prompts: list[ReqSlice] = []
    num_left = config.max_prefill_length
    for row in range(limits.num_rows):
        length = min(limits.max_seq_len - 1, num_left)
        if length > 1:
            prompts.append(_slice(limits, row, 0, length, params))
            num_left -= length
        else:
            decodes.append(_slice(limits, row, num_shared, num_shared + 1, params))
    groups = []
    if num_shared and len(decodes) >= FEWEST_IN_GROUP:
        groups.append(PrefixGroup(num_shared, [*range(len(decodes))]))
    return BatchPlan([*decodes, *prompts], prefix_groups=groups)


def warm_up_samples(limits: EngineLimits) -> list[list[ReqSlice]]:
    """Slices that sample, with all that changes logits, with filters and without."""
    counts = {min(count, limits.num_rows) for count in _NUMS_OF_SAMPLES}
    samples = []
    for count in sorted(counts):
        for params in (_CHANGED, _CHANGED_AND_FILTERED):
            samples.append([_slice(limits, row, 0, 1, params) for row in range(count)])
    return samples


def _largest_continued(config: EngineConfig, limits: EngineLimits) -> BatchPlan:
    """A step of as many tokens as possible, in prompts whose beginnings are computed already."""
    assert config.max_prefill_length
    longest = max(1, limits.max_seq_len - 1)
    num_prompts = min(limits.num_rows, -(-config.max_prefill_length // longest))
    num_tokens = min(longest, config.max_prefill_length // num_prompts)
    rows = range(limits.num_rows)
    return _plan(limits, rows[num_prompts:], rows[:num_prompts], 1, num_tokens)


def _plan(
    limits: EngineLimits,
    decode_rows: Iterable[int],
    prompt_rows: Iterable[int],
    start: int,
    num_tokens: int,
    params: tuple[SamplingParams, ...] = (),
) -> BatchPlan:
    """A step of decodes and prompts that writes to the tables what stands there.

    Args:
        start, num_tokens: of each prompt's slice; less if no request can have so many.
        params: of the first prompts.
    """
    second = min(1, limits.max_seq_len - 1)
    start = min(start, second)
    end = min(start + num_tokens, limits.max_seq_len)
    slices = [_slice(limits, row, second, second + 1, _PLAIN) for row in decode_rows]
    for i, row in enumerate(prompt_rows):
        slices.append(_slice(limits, row, start, end, params[i] if i < len(params) else _PLAIN))
    return BatchPlan(slices, _writes(limits))


def _slice(
    limits: EngineLimits, row: int, start: int, end: int, params: SamplingParams
) -> ReqSlice:
    req = Req(row, np.zeros(end, dtype=np.int32), params, limits.max_seq_len, seed=0)
    req.row = row
    return ReqSlice(req, start, end, samples=True)


def _writes(limits: EngineLimits) -> TableWrites:
    """Writes of all kinds to the first row, which leave the padding page in it."""
    first = np.zeros(1, dtype=np.int32)
    padding_page = np.full(1, limits.num_pages, dtype=np.int32)
    num_tokens = min(limits.page_size, limits.max_seq_len)
    return TableWrites(first, padding_page, first, first, (RowCopy(0, 0, num_tokens),))
