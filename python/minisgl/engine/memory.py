"""How many pages of KV the memory allows."""

from __future__ import annotations

import torch

from minisgl.distributed import DistributedCommunicator
from minisgl.engine.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.utils.arch import available_memory

_PACK_SHARE = 0.2  # weights are packed if a second copy takes at most this part of what is free


def free_bytes(device: torch.device, num_ranks: int) -> int:
    """Memory that this rank may still take; on a CPU the ranks share it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() // num_ranks


def may_pack(config: EngineConfig, weight_bytes: int, device: torch.device) -> bool:
    """Whether a second copy of the weights fits easily, if the user did not say."""
    if config.pack_weights is not None:
        return config.pack_weights
    return weight_bytes <= _PACK_SHARE * free_bytes(device, config.tp)


def num_pages(
    config: EngineConfig,
    page_bytes: int,
    max_seq_len: int,
    device: torch.device,
    comm: DistributedCommunicator,
) -> int:
    """Pages of the pool, the same on all ranks.

    As asked for, else what the memory allows, but not more than all rows together can ever use.

    Raises:
        ConfigError: not even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    assert config.memory_ratio is not None and config.page_size is not None
    affordable = int(free_bytes(device, config.tp) * config.memory_ratio) // page_bytes
    usable = config.max_running_requests * -(-max_seq_len // config.page_size)
    if affordable < 1:
        raise ConfigError(f"no memory is left for the KV cache: one page takes {page_bytes:,} bytes")
    agreed = torch.tensor([min(affordable, usable)], dtype=torch.int64, device=device)
    return int(comm.all_reduce_min(agreed).item())
