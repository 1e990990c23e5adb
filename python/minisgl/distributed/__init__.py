"""Tensor parallelism: which shards a rank has, and the collectives among ranks.

`DistributedInfo` has rank and size and divides heads and weights. A `DistributedCommunicator`
reduces and gathers tensors; layers get it as an argument. There is no process-wide group. A
`PartialSum` is a tensor in parts that are still to be added up, over the ranks or on one of them.

    info.py               the rank of a process, and its shards
    communicator.py       collectives among the ranks
    partial_sum.py        a tensor in parts that are still to be added up
    nccl_communicator.py  collectives by NCCL, on the current stream
    nccl_library.py       the functions of NCCL's library
    peer_communicator.py  sums through peer memory, where they are faster than NCCL's
    peer_memory.py        memory of a GPU that the ranks of other GPUs read and write
    protocol_table.py     the fastest protocol for a sum, by its size, as measured

Read `communicator.py`, then `nccl_communicator.py` and `peer_communicator.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from minisgl.distributed.communicator import (
    DistributedCommunicator,
    SingleCommunicator,
    TorchCommunicator,
)
from minisgl.distributed.info import DistributedInfo
from minisgl.distributed.nccl_communicator import NcclCommunicator
from minisgl.distributed.nccl_library import NcclError, load_nccl, nccl_version
from minisgl.distributed.partial_sum import PartialSum, SumOverInputs, SumOverRanks, whole
from minisgl.distributed.peer_communicator import PeerCommunicator, with_peer_memory
from minisgl.errors import ConfigError

__all__ = [
    "DistributedCommunicator",
    "DistributedInfo",
    "NcclCommunicator",
    "PartialSum",
    "PeerCommunicator",
    "SingleCommunicator",
    "SumOverInputs",
    "SumOverRanks",
    "TorchCommunicator",
    "create_communicator",
    "whole",
]

logger = logging.getLogger(__name__)


def create_communicator(
    info: DistributedInfo,
    device: torch.device,
    rendezvous: Path | None,
    comm: str | None = None,
    timeout_s: float = 600.0,
) -> DistributedCommunicator:
    """Join the group of `info`; blocks until all its ranks have joined.

    Args:
        rendezvous: path of a file that all ranks and no other process use; absent at first. A group
            of one needs none.
        comm: what the ranks use on GPUs, of `COMM_NAMES`; None for the fastest for each size of
            sum, as measured now.

    Raises:
        ConfigError: `comm` does not work here.
    """
    if info.size == 1:
        return SingleCommunicator()
    assert rendezvous is not None
    if device.type == "cpu" or comm == "torch":
        return TorchCommunicator(info, device, rendezvous, timeout_s)
    group = _join_nccl(info, device, rendezvous, timeout_s, is_required=comm == "pynccl")
    if comm == "pynccl":
        return group
    return with_peer_memory(group, device, is_required=comm == "peer")


def _join_nccl(
    info: DistributedInfo,
    device: torch.device,
    rendezvous: Path,
    timeout_s: float,
    *,
    is_required: bool,
) -> DistributedCommunicator:
    """Join a group of NCCL: by torch, where the library cannot be called without it."""
    try:
        nccl = load_nccl()
    except NcclError as error:  # on all ranks alike: they are on one machine
        if is_required:
            raise ConfigError(f"--comm pynccl does not work here: {error}") from None
        logger.info("torch calls NCCL: %s", error)
        return TorchCommunicator(info, device, rendezvous, timeout_s)
    logger.debug("NCCL %s", nccl_version(nccl))
    try:
        return NcclCommunicator(nccl, info, device, rendezvous, timeout_s)
    except NcclError as error:  # perhaps on this rank alone, so there is no other way to go on
        raise ConfigError(
            f"NCCL cannot connect the ranks: {error}; --comm torch leaves that to torch"
        ) from None
