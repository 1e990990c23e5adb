"""Tensor parallelism: which shards a rank has, and the collectives among ranks.

`DistributedInfo` has rank and size and divides heads and weights. A `DistributedCommunicator`
reduces and gathers tensors; layers get it as an argument. There is no process-wide group. Read
`communicator.py`, then `peer_communicator.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.distributed.communicator import (
    DistributedCommunicator,
    SingleCommunicator,
    TorchCommunicator,
)
from minisgl.distributed.info import DistributedInfo
from minisgl.distributed.peer_communicator import PeerCommunicator, with_peer_memory

__all__ = [
    "DistributedCommunicator",
    "DistributedInfo",
    "PeerCommunicator",
    "SingleCommunicator",
    "TorchCommunicator",
    "create_communicator",
]


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
        comm: what adds up on GPUs, of `COMM_NAMES`; None: the fastest there is, as measured now.

    Raises:
        ConfigError: that does not work here.
    """
    if info.size == 1:
        return SingleCommunicator()
    assert rendezvous is not None
    group = TorchCommunicator(info, device, rendezvous, timeout_s)
    if device.type == "cpu" or comm == "nccl":
        return group
    return with_peer_memory(group, device, is_required=comm == "peer")
