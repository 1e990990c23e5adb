"""Runs batches: weights, KV pool, attention and sampling of one tensor-parallel rank.

A step:

    model_runner.py       prepares, launches and samples plans
    steps.py              a step between these phases
    batch_builder.py      a plan as tensors, for eager steps
    slice_tokens.py       the tokens of a plan's slices
    sampler.py            logits to tokens in the token pool
    sampling_batch.py     temperature, filters and seeds of a batch
    logits_processing.py  bias, bans and penalties
    logprobs.py           log probabilities of tokens, on their way to the host
    prompt_outputs.py     logprobs of a prompt, and its embedding
    sampled_step.py       the sampled tokens, on their way to the host
    graphs/               steps captured as graphs, on a GPU and on a CPU

The start:

    engine.py           `Engine`: its start and its end
    limits.py           how much an engine can hold
    model_loader.py     the model with its weights, on its rank
    kernel_builds.py    which kernels are compiled meanwhile
    kernel_warm_up.py   Triton kernels, called once so that they are compiled early
    product_warm_up.py  those of linear layers
    kernel_sizes.py     the sizes that they are called with
    pool_size.py        how many requests may run, and how many pages fit
    memory.py           the device's memory: what is free, and what happens when it is full
    warm_up.py          the steps that run once before the engine serves

Does not know which requests there are: the scheduler does. Read `model_runner.py`.
"""

from minisgl.engine.engine import Engine
from minisgl.engine.limits import EngineLimits
from minisgl.engine.sampled_step import SampledStep
from minisgl.engine.sampler import sample_logits
from minisgl.engine.steps import LaunchedStep, PreparedStep

__all__ = [
    "Engine",
    "EngineLimits",
    "SampledStep",
    "LaunchedStep",
    "PreparedStep",
    "sample_logits",
]
