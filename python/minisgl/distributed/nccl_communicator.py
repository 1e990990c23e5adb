"""Collectives by NCCL, called without torch.distributed.

Read `communicator.py` first. docs/devices.md has the rules of streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from minisgl.distributed.communicator import DistributedCommunicator, side_by_side
from minisgl.distributed.info import DistributedInfo
from minisgl.distributed.nccl_library import NCCL_DTYPES, NCCL_MIN, NCCL_SUM, UniqueId
from minisgl.errors import KernelInputError
from minisgl.utils import env


class NcclCommunicator(DistributedCommunicator):
    """Owns a group of NCCL. A collective is enqueued on the current stream.

    There is no other stream, no event and no copy around a reduction. A call returns once the
    collective is enqueued, and may be captured in a CUDA graph. Only one thread may call at a time,
    and the caller orders all collectives of a group, as if they were on one stream. Tensors are
    contiguous and on `device`. A collective has no timeout.

    Args:
        nccl: see `load_nccl`.
        device: the GPU of this rank, with its index.
        rendezvous: see `create_communicator`.
        timeout_s: how long to wait until all ranks have joined.

    Raises:
        NcclError: NCCL cannot connect the ranks.
        RuntimeError: a rank does not join in time.
    """

    def __init__(
        self,
        nccl: Any,
        info: DistributedInfo,
        device: torch.device,
        rendezvous: Path,
        timeout_s: float,
    ) -> None:
        super().__init__(info)
        env.keep_nccl_local()
        self._nccl = nccl
        self._device = device
        own_id = UniqueId()
        if info.leads:
            nccl.ncclGetUniqueId(ctypes.byref(own_id))
        # Before ncclCommInitRank, which waits for the others without a limit.
        common_id = UniqueId.from_buffer_copy(meet(info, rendezvous, timeout_s, bytes(own_id)))
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            nccl.ncclCommInitRank(ctypes.byref(self._comm), info.size, common_id, info.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._reduce(x, NCCL_SUM)

    def all_reduce_min(self, x: Tensor) -> Tensor:
        return self._reduce(x, NCCL_MIN)

    def _reduce(self, x: Tensor, operation: int) -> Tensor:
        dtype = nccl_dtype(x, self._device)
        if x.numel():
            address = x.data_ptr()
            self._nccl.ncclAllReduce(
                address, address, x.numel(), dtype, operation, self._comm, self._stream()
            )
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        own = x.contiguous()
        dtype = nccl_dtype(own, self._device)
        gathered = x.new_empty(self.info.size, *x.shape)
        if x.numel():
            self._nccl.ncclAllGather(
                own.data_ptr(), gathered.data_ptr(), x.numel(), dtype, self._comm, self._stream()
            )
        return side_by_side(gathered)

    def gather(self, x: Tensor) -> Tensor | None:
        if not self.info.leads:
            self._send(x.contiguous())
            return None
        gathered = x.new_empty(self.info.size, *x.shape)
        gathered[0].copy_(x)
        self._receive(gathered)
        return side_by_side(gathered)

    def _send(self, x: Tensor) -> None:
        """Send x to rank 0."""
        dtype = nccl_dtype(x, self._device)
        if x.numel():
            self._nccl.ncclSend(x.data_ptr(), x.numel(), dtype, 0, self._comm, self._stream())

    def _receive(self, gathered: Tensor) -> None:
        """Receive row r of `gathered` from each other rank r, all at once."""
        dtype = nccl_dtype(gathered, self._device)
        if not gathered.numel():
            return
        stream = self._stream()
        with self._one_launch():
            for rank, row in enumerate(gathered[1:], start=1):
                self._nccl.ncclRecv(row.data_ptr(), row.numel(), dtype, rank, self._comm, stream)

    def broadcast(self, x: Tensor) -> Tensor:
        dtype = nccl_dtype(x, self._device)
        if x.numel():
            address = x.data_ptr()
            self._nccl.ncclBroadcast(
                address, address, x.numel(), dtype, 0, self._comm, self._stream()
            )
        return x

    def close(self) -> None:
        """Wait for this rank's kernels and leave the group, together with the other ranks.

        NCCL waits forever while a graph that has captured a collective is alive.
        """
        torch.cuda.synchronize(self._device)
        self._nccl.ncclCommDestroy(self._comm)
        self._comm = ctypes.c_void_p()  # which NCCL refuses

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    @contextmanager
    def _one_launch(self) -> Iterator[None]:
        """Let NCCL do all that is called in the block in one kernel."""
        self._nccl.ncclGroupStart()
        try:
            yield
        finally:
            self._nccl.ncclGroupEnd()


def nccl_dtype(x: Tensor, device: torch.device) -> int:
    """Return NCCL's number for the dtype of x, which a collective is to read or write.

    Raises:
        KernelInputError: NCCL on this device does not take x.
    """
    if x.device != device:
        raise KernelInputError(f"x of a collective is on {x.device}, its group on {device}")
    if not x.is_contiguous():
        raise KernelInputError(f"x of a collective has strides {x.stride()}, not contiguous ones")
    dtype = NCCL_DTYPES.get(x.dtype)
    if dtype is None:
        known = ", ".join(str(each) for each in NCCL_DTYPES)
        raise KernelInputError(f"x of a collective is of {x.dtype}, and not of {known}")
    return dtype


def meet(info: DistributedInfo, rendezvous: Path, timeout_s: float, word: bytes) -> bytes:
    """Wait until all ranks have joined, and return the word of rank 0.

    Raises:
        RuntimeError: a rank does not join in time; the message names it.
    """
    store = FileStore(str(rendezvous), info.size)
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"rank {info.rank}", word.hex())
    words = [store.get(f"rank {rank}") for rank in range(info.size)]
    return bytes.fromhex(words[0].decode())
