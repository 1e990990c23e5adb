"""How many requests may run, how many pages of KV fit, and the error when memory is too little."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from minisgl.config import EngineConfig
from minisgl.core import BatchPlan, Req, ReqSlice, SamplingParams
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import ConfigError, StepOutOfMemory
from minisgl.utils.arch import available_memory

A = TypeVar("A")
R = TypeVar("R")

# Weights are packed if a second copy takes at most this fraction of what is free.
_MAX_PACKED_FRACTION = 0.2
_MAX_SLOTS = 2**31 - 2**16  # slots are int32; the padding page comes after them
_MAX_PINNED_BITS = 17  # the ids of 20 likeliest tokens for 512 requests are 80 kB
_NUM_PINNED_BLOCKS = 8  # of a size, at a time
# Requests that run at a time. Of more, each step reads the weights for more tokens: 512 streams of
# Qwen3-0.6B on an H200 wait 127 ms for the first one, and not 917, and get 9 % more of them.
_RUNNING = 256
_RUNNING_WITH_ROOM = 512
_TOKENS_WITH_ROOM = 2048  # of each
_ADVICE = "--max-prefill-length, --max-running-requests, --cuda-graph-max-bs, or raise --tp"


@contextmanager
def out_of_memory_is_explained(doing: str) -> Iterator[None]:
    """
    Raises:
        ConfigError: the device's memory is full; says what it was for, what is free, and what to
            change.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        reason = str(error).partition(". ")[2].partition(". ")[0]  # "Tried to allocate ..."
        raise ConfigError(
            f"the GPU's memory is full, {doing}: {free / 1e9:.1f} of {total / 1e9:.1f} GB "
            f"are free. {reason}; lower --memory-ratio or --num-pages, {_ADVICE}"
        ) from None


def free_if_out_of_memory(work: Callable[[A], R], argument: A) -> R:
    """Do a part of a step; if the device's memory is full, free what the step holds.

    It is no context manager. An error that is raised while another is handled keeps that one alive,
    with its frames and their tensors.

    Raises:
        StepOutOfMemory: in place of torch's error.
    """
    try:
        return work(argument)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    return_memory()
    raise StepOutOfMemory(reason)


def free_bytes(device: torch.device, num_ranks: int) -> int:
    """Memory that this rank may still take; on a CPU the ranks share it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() // num_ranks


def return_memory() -> None:
    """Give memory that is no longer used back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def reserve_pinned_memory() -> None:
    """Let torch keep pinned memory for the results and the plans of a step, of every size.

    What is freed here is taken by later steps. To pin more takes a fraction of a millisecond each.
    """
    sizes = [1 << bits for bits in range(2, _MAX_PINNED_BITS + 1)]
    blocks = [
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for size in sizes
        for _ in range(_NUM_PINNED_BLOCKS)
    ]
    blocks.clear()


def may_pack(config: EngineConfig, weight_bytes: int, device: torch.device) -> bool:
    """Whether weights are packed: as the option says, else if a second copy of them fits easily."""
    if config.pack_weights is not None:
        return config.pack_weights
    return weight_bytes <= _MAX_PACKED_FRACTION * free_bytes(device, config.tp)


def num_rows(
    config: EngineConfig, page_bytes: int, device: torch.device, comm: DistributedCommunicator
) -> int:
    """Requests that run at a time, equal on all ranks: as the option says, or as memory has room.

    To be asked before anything but the weights is made: tables and buffers have their sizes of it.
    """
    if config.max_running_requests is not None:
        return config.max_running_requests
    if config.device != "cuda":
        return _RUNNING
    assert config.page_size is not None
    pages = _affordable_pages(config, page_bytes, free_bytes(device, config.tp))
    num_tokens = pages * config.page_size
    has_room = num_tokens >= _RUNNING_WITH_ROOM * _TOKENS_WITH_ROOM
    return _agree_on(_RUNNING_WITH_ROOM if has_room else _RUNNING, device, comm)


def num_pages(
    config: EngineConfig,
    page_bytes: int,
    device: torch.device,
    comm: DistributedCommunicator,
    step_bytes: int = 0,
) -> int:
    """Pages of the pool, equal on all ranks: as many as the option says, or the memory allows.

    What all running requests together cannot use holds cached prefixes.

    Args:
        step_bytes: memory that steps will take besides.

    Raises:
        ConfigError: not even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    assert config.page_size is not None
    affordable = _affordable_pages(config, page_bytes, free_bytes(device, config.tp) - step_bytes)
    if affordable < 1:
        raise ConfigError(
            f"no memory is left for the KV cache: a page takes {page_bytes:,} bytes, "
            f"steps {step_bytes:,}; lower {_ADVICE}"
        )
    addressable = _MAX_SLOTS // config.page_size
    return _agree_on(min(affordable, addressable), device, comm)


def _affordable_pages(config: EngineConfig, page_bytes: int, num_bytes: int) -> int:
    assert config.memory_ratio is not None
    return int(num_bytes * config.memory_ratio) // page_bytes


def _agree_on(number: int, device: torch.device, comm: DistributedCommunicator) -> int:
    """The smallest number of all ranks."""
    agreed = torch.tensor([number], dtype=torch.int64, device=device)
    return int(comm.all_reduce_min(agreed).item())


def most_tokens(config: EngineConfig) -> int:
    """The most tokens of a step: those of prompts, and a decode of every request."""
    assert config.max_prefill_length
    assert config.max_running_requests
    return config.max_prefill_length + config.max_running_requests


def largest_step(config: EngineConfig, max_seq_len: int) -> BatchPlan:
    """The step that takes most memory.

    It has as many prompt tokens as a step may have, all other requests decode, and each has the
    sampling parameters that take memory.
    """
    assert config.max_prefill_length
    assert config.max_running_requests
    params = SamplingParams(top_p=0.9, presence_penalty=1.0, logprobs=1)
    slices: list[ReqSlice] = []
    num_left = config.max_prefill_length
    for row in range(config.max_running_requests):
        length = max(1, min(max_seq_len - 1, num_left))
        num_left -= length
        req = Req(row, np.zeros(length, dtype=np.int32), params, max_seq_len, seed=0)
        req.row = row
        slices.insert(0, ReqSlice(req, 0, length, samples=True))
    return BatchPlan(slices)
