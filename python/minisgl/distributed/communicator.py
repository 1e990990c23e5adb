"""Collectives among the ranks of one tensor-parallel group.

Owns the process group and nothing else. Every rank must call the same methods in the same order.
Reductions are in place: there are no copies around a collective. On a GPU a collective is on the
current stream; docs/devices.md has the rules of streams.
"""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore

from minisgl.distributed.info import DistributedInfo
from minisgl.kernel import residual_norm
from minisgl.utils import env

OptionsT = TypeVar("OptionsT")

_LOOPBACK = "127.0.0.1"


class DistributedCommunicator(ABC):
    """Collectives over the ranks of `info`.

    On a CPU each returns when it is done. On a GPU it returns when it is enqueued on the current
    stream: what is enqueued there afterwards finds the result.
    """

    def __init__(self, info: DistributedInfo) -> None:
        self.info = info

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns x."""

    def add_up_and_norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `kernel.residual_norm` of the sum of x over the ranks, which overwrites x."""
        return residual_norm(self.all_reduce(x_TD), residual_TD, weight_D, eps)

    @abstractmethod
    def all_reduce_min(self, x: Tensor) -> Tensor:
        """Minimum over the ranks, in place; returns x."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the x of all ranks, which have one shape, along the last dimension."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor | None:
        """Like `all_gather`, but only rank 0 gets the result; the others get None."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite the x of every rank with that of rank 0; returns x."""

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

    NCCL's collectives are on the current stream, as those of `NcclCommunicator` are. A thread of
    torch watches them, and ends the process if one takes longer than the timeout.

    The ranks find each other through a file, so that no port has to be chosen. They are processes
    of one machine, so they listen on its loopback, or on an interface that the environment names.
    The group is an object and not process-wide, so that two groups can live in one process.
    """

    def __init__(
        self, info: DistributedInfo, device: torch.device, rendezvous: Path, timeout_s: float
    ) -> None:
        super().__init__(info)
        store = FileStore(str(rendezvous), info.size)
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # torch's stubs give backends no methods
        if device.type == "cuda":
            env.keep_nccl_local()
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, info.rank, info.size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, info.rank, info.size, _gloo_options(timeout))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.SUM)

    def all_reduce_min(self, x: Tensor) -> Tensor:
        return self._reduce(x, dist.ReduceOp.MIN)

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        options = _options(dist.AllreduceOptions, reduceOp=op)
        _wait(self._group.allreduce([x], options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        # One tensor, with one x after the other, so that numbers are copied only once.
        gathered = x.new_empty(self.info.size, *x.shape)
        options = _options(AllgatherOptions)
        _wait(self._group._allgather_base(gathered.flatten(), x.contiguous().flatten(), options))
        return side_by_side(gathered)

    def gather(self, x: Tensor) -> Tensor | None:
        options = _options(dist.GatherOptions, rootRank=0)
        if not self.info.leads:
            _wait(self._group.gather([], [x.contiguous()], options))
            return None
        gathered = x.new_empty(self.info.size, *x.shape)
        _wait(self._group.gather([list(gathered)], [x.contiguous()], options))
        return side_by_side(gathered)

    def broadcast(self, x: Tensor) -> Tensor:
        options = _options(dist.BroadcastOptions, rootRank=0)
        _wait(self._group.broadcast([x], options))
        return x

    def close(self) -> None:
        self._group.shutdown()


def side_by_side(gathered: Tensor) -> Tensor:
    """Concatenate the tensors of the ranks, stacked in the first dimension, along the last."""
    return gathered.movedim(0, -2).flatten(-2)


def _options(kind: type[OptionsT], **values: Any) -> OptionsT:
    """Options of a collective, which let NCCL use the current stream instead of its own."""
    options = kind()
    for name, value in {"asyncOp": False, **values}.items():
        setattr(options, name, value)
    return options


def _wait(work: dist.Work | None) -> None:
    """Wait until a collective of gloo is done; NCCL has enqueued its own and returns None."""
    if work is not None:
        work.wait()


def _gloo_options(timeout: timedelta) -> Any:
    """Options that name the device; gloo's own is the address of the host's name."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its devices
    interface = env.gloo_interface()
    if interface:
        device = gloo.create_device(interface=interface)
    else:
        device = gloo.create_device(hostname=_LOOPBACK)
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timeout
    return options
