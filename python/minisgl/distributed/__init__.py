"""Tensor parallelism: who this rank is, and how it talks to the others.

`DistributedInfo` says rank and size; a `DistributedCommunicator` reduces and gathers tensors. It is handed to
the layers that need it; there is no process-wide group.
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
