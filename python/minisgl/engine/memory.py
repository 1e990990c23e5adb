"""A device's memory: how much is free, how it is freed, and what happens when it is full."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from minisgl.errors import ConfigError, StepOutOfMemory
from minisgl.utils.hardware import available_memory

A = TypeVar("A")
R = TypeVar("R")

_MAX_PINNED_BITS = 17  # the ids of 20 likeliest tokens for 512 requests are 80 kB
_NUM_PINNED_BLOCKS = 8  # of a size, at a time
# What to change if steps take too much memory, beside what makes the KV cache smaller.
STEP_OPTIONS = "--max-prefill-length, --max-running-requests, --cuda-graph-max-bs, or raise --tp"
LOWER_STEPS = f"lower --memory-ratio or --num-pages, {STEP_OPTIONS}"


@contextmanager
def out_of_memory_is_explained(doing: str, advice: str) -> Iterator[None]:
    """
    Args:
        advice: what to change, as an imperative.

    Raises:
        ConfigError: the device's memory is full; says what it was for, what is free, and what to
            change.
    """
    try:
        yield
    except (torch.OutOfMemoryError, StepOutOfMemory) as error:
        free, total = torch.cuda.mem_get_info()
        reason = str(error).partition(". ")[2].partition(". ")[0]  # "Tried to allocate ..."
        raise ConfigError(
            f"the GPU's memory is full, {doing}: {free / 1e9:.1f} of {total / 1e9:.1f} GB "
            f"are free. {reason}; {advice}"
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
