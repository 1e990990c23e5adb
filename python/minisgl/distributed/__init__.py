"""Tensor parallelism: which shards a rank has, and the collectives among ranks.

`DistributedInfo` has rank and size and divides heads and weights. A `DistributedCommunicator`
reduces and gathers tensors; layers get it as an argument. There is no process-wide group.
"""

from minisgl.distributed.communicator import (
    DistributedCommunicator,
    SingleCommunicator,
    TorchCommunicator,
    create_communicator,
)
from minisgl.distributed.info import DistributedInfo

__all__ = [
    "DistributedCommunicator",
    "DistributedInfo",
    "SingleCommunicator",
    "TorchCommunicator",
    "create_communicator",
]
