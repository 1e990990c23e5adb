"""How many requests run, and how large the KV pool is: what weights and the largest step leave.

On a GPU the largest step is tried, over a pool of one page. On a CPU a step takes little beside the
weights, and the options say which part of the memory the pool gets.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl.config import EngineConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.engine.limits import EngineLimits
from minisgl.engine.memory import (
    LOWER_STEPS,
    STEP_OPTIONS,
    free_bytes,
    out_of_memory_is_explained,
    return_memory,
)
from minisgl.engine.model_loader import LoadedModel
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.warm_up import largest_step
from minisgl.errors import ConfigError
from minisgl.kvcache import MHAKVCache

# Requests that run at a time. With 512 instead of 256, a step reads the weights once for twice the
# tokens. 512 streams of Qwen3-0.6B on an H200 get the first token after 127 ms instead of 917, and
# 9 % more tokens a second (benchmark/results/h200-online.jsonl, eb3a239).
_RUNNING = 256
_RUNNING_WITH_ROOM = 512
_TOKENS_WITH_ROOM = 2048  # of each
_MAX_SLOTS = 2**31 - 2**16  # slots are int32; the padding page comes after them


def fit_limits(config: EngineConfig, loaded: LoadedModel) -> EngineLimits:
    """The limits of an engine beside weights and steps, equal on all ranks.

    Raises:
        ConfigError: not even one page fits.
    """
    assert config.page_size
    is_on_gpu = loaded.device.type == "cuda"
    if is_on_gpu:
        return_memory()  # of loading, as the other copy of a tied head, and of an earlier engine
    num_layers, *_ = loaded.kv_shape
    page_bytes = MHAKVCache.page_bytes(*loaded.kv_shape, config.page_size, loaded.dtype.itemsize)
    of_one_page = EngineLimits(
        page_size=config.page_size,
        max_seq_len=loaded.max_seq_len,
        num_pages=1,
        num_rows=fit_num_rows(config, page_bytes, loaded.device, loaded.comm),
        vocab_size=loaded.config.vocab_size,
        eos_ids=loaded.config.eos_ids,
        kv_bytes=page_bytes // (num_layers * config.page_size),
    )
    step_bytes = 0
    if is_on_gpu and config.num_pages is None:  # else the warm-up shows if it is too large
        with out_of_memory_is_explained("trying the largest step", LOWER_STEPS):
            step_bytes = bytes_of_steps(config, loaded, of_one_page)
    pages = fit_num_pages(config, page_bytes, loaded.device, loaded.comm, step_bytes)
    num_tokens = pages * config.page_size
    return replace(
        of_one_page,
        num_pages=pages,
        max_seq_len=min(loaded.max_seq_len, num_tokens),
        is_pool_shorter=num_tokens < loaded.max_seq_len,
    )


def bytes_of_steps(config: EngineConfig, loaded: LoadedModel, limits: EngineLimits) -> int:
    """Bytes that steps take beside weights and KV: activations, workspaces, graphs.

    They are measured before the KV cache is sized. What this process takes once and keeps, as
    modules of kernels, is no longer free then, so it does not count.

    Args:
        limits: with few pages; no step reads what stands in them.
    """
    runner = ModelRunner(config, loaded, limits, few_graphs=True)
    plan = largest_step(config, limits)
    runner.sample(runner.launch(runner.prepare(plan))).wait()
    torch.cuda.synchronize()
    free_during = free_bytes(loaded.device, config.tp)
    not_captured = runner.bytes_not_captured
    runner.close()
    return_memory()
    return free_bytes(loaded.device, config.tp) - free_during + not_captured


def fit_num_rows(
    config: EngineConfig, page_bytes: int, device: torch.device, comm: DistributedCommunicator
) -> int:
    """Requests that run at a time, equal on all ranks: as the option says, or as memory has room.

    Call it before anything but the weights is allocated: it sizes tables and buffers.
    """
    if config.max_running_requests is not None:
        return config.max_running_requests
    if config.device != "cuda":
        return _RUNNING
    assert config.page_size is not None
    pages = _affordable_pages(config, page_bytes, free_bytes(device, config.tp))
    has_room = pages * config.page_size >= _RUNNING_WITH_ROOM * _TOKENS_WITH_ROOM
    return _agree_on(_RUNNING_WITH_ROOM if has_room else _RUNNING, device, comm)


def fit_num_pages(
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
        ConfigError: not even one page fits, or the option says more than can be addressed.
    """
    assert config.page_size is not None
    addressable = _MAX_SLOTS // config.page_size
    if config.num_pages is not None:
        if config.num_pages > addressable:
            raise ConfigError(
                f"--num-pages must be <= {addressable} with pages of {config.page_size} tokens, "
                f"got {config.num_pages}"
            )
        return config.num_pages
    num_free = free_bytes(device, config.tp)
    affordable = _affordable_pages(config, page_bytes, num_free - step_bytes)
    if affordable < 1:
        raise ConfigError(
            f"no memory is left for the KV cache: of {num_free:,} free bytes steps take "
            f"{step_bytes:,}, and a page {page_bytes:,}; "
            f"raise --memory-ratio ({config.memory_ratio:g}), or lower {STEP_OPTIONS}"
        )
    return _agree_on(min(affordable, addressable), device, comm)


def _affordable_pages(config: EngineConfig, page_bytes: int, num_bytes: int) -> int:
    assert config.memory_ratio is not None
    return int(num_bytes * config.memory_ratio) // page_bytes


def _agree_on(number: int, device: torch.device, comm: DistributedCommunicator) -> int:
    """The smallest number of all ranks."""
    agreed = torch.tensor([number], dtype=torch.int64, device=device)
    return int(comm.all_reduce_min(agreed).item())
