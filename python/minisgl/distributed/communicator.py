"""Collectives among the ranks of one tensor-parallel group.

Owns the process group and nothing else. Every rank calls the same methods in the same order. Reduces in
place: no copies around a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from minisgl.distributed.info import DistributedInfo


class DistributedCommunicator(ABC):
    """Collectives over the ranks of `info`. All return when the result may be used on the current stream."""

    def __init__(self, info: DistributedInfo) -> None:
        self.info = info

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns x."""

    @abstractmethod
    def all_reduce_min(self, x: Tensor) -> Tensor:
        """Minimum over the ranks, in place; returns x."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the x of all ranks, of one shape, along the last dimension."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor | None:
        """Like `all_gather`, but only rank 0 receives; the others get None."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Give every rank the x of rank 0, in place; returns x."""

    def close(self) -> None:  # noqa: B027 - optional, not abstract
        """Leave the group."""


class SingleCommunicator(DistributedCommunicator):
    """A group of one: every collective is the identity."""

    def __init__(self) -> None:
        super().__init__(DistributedInfo())

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_min(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


class TorchCommunicator(DistributedCommunicator):
    """torch.distributed: gloo on a CPU, NCCL on GPUs.

    The ranks meet through a file, so that no port has to be chosen, and the group is an object of its own, so
    that two groups can live in one process.
    """

    def __init__(
        self, info: DistributedInfo, device: torch.device, meeting: Path, timeout_s: float
    ) -> None:
        super().__init__(info)
        store = FileStore(str(meeting), info.size)
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # torch's stubs give backends no methods
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, info.rank, info.size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, info.rank, info.size, timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.SUM)

    def all_reduce_min(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MIN)

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        self._group.allreduce([x], options).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.info.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def gather(self, x: Tensor) -> Tensor | None:
        parts = (
            [torch.empty_like(x) for _ in range(self.info.size)] if self.info.is_primary else None
        )
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, x: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()
        return x

    def close(self) -> None:
        self._group.shutdown()


def create_communicator(
    info: DistributedInfo, device: torch.device, meeting: Path | None, timeout_s: float = 600.0
) -> DistributedCommunicator:
    """Join the group of `info`; blocks until all its ranks have come.

    Args:
        meeting: a file path known to all ranks and to nobody else, absent at first; unused for a group of one.
    """
    if info.size == 1:
        return SingleCommunicator()
    assert meeting is not None
    return TorchCommunicator(info, device, meeting, timeout_s)
