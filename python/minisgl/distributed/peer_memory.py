"""Memory of a GPU that the processes of other GPUs read and write: CUDA IPC.

Every rank allocates memory, sends its handle to the others and maps theirs. The functions are those
of CUDA's driver, whose library has the same name wherever there is a GPU. No multicast is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from minisgl.distributed.communicator import DistributedCommunicator

T = TypeVar("T")

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class PeerMemoryError(Exception):
    """Memory cannot be shared between these ranks; raised on all of them."""


class PeerMemory:
    """One piece of memory of each rank, zero at first, which every rank reads and writes.

    All ranks make and close it together. No kernel of any rank may use it after `close`.

    Args:
        comm: collectives over the ranks; not closed here.

    Attributes:
        addresses: where this process sees the memory of each rank.

    Raises:
        PeerMemoryError: on all ranks, if a step failed on one.
    """

    def __init__(self, comm: DistributedCommunicator, device: torch.device, num_bytes: int) -> None:
        self._comm = comm
        self._device = device
        self._num_bytes = num_bytes
        self._own: int | None = None
        self._opened: list[int] = []
        self.addresses: list[int] = []
        try:
            handle = self._together(self._allocate)
            handles = comm.all_gather(torch.tensor(list(handle), dtype=torch.uint8, device=device))
            self.addresses = self._together(lambda: self._open(bytes(handles.tolist())))
            self._together(self._mark)
            self._together(self._check_marks)
        except PeerMemoryError:
            self.close()
            raise

    def close(self) -> None:
        """Wait for this rank's kernels, and give the memory back once no rank uses it."""
        torch.cuda.synchronize(self._device)
        while self._opened:
            _driver("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))
        self._agree(True)
        if self._own is not None:
            _driver("cuMemFree_v2", ctypes.c_uint64(self._own))
            self._own = None

    def _together(self, step: Callable[[], T]) -> T:
        """Take a step on all ranks; if it fails on one, no rank goes on."""
        try:
            result = step()
            torch.cuda.synchronize(self._device)
        except (OSError, PeerMemoryError) as error:
            self._agree(False)
            raise PeerMemoryError(str(error)) from None
        if not self._agree(True):
            raise PeerMemoryError("another rank cannot share memory")
        return result

    def _agree(self, answer: bool) -> bool:
        """Whether the answers of all ranks are yes; they wait for each other."""
        answers = torch.tensor([answer], dtype=torch.int32, device=self._device)
        return bool(self._comm.all_reduce_min(answers).item())

    def _allocate(self) -> bytes:
        """Allocate this rank's memory and return its handle."""
        own = self._device.index
        for peer in range(self._comm.info.size):
            if peer != own and not torch.cuda.can_device_access_peer(own, peer):
                raise PeerMemoryError(f"GPU {own} cannot access the memory of GPU {peer}")
        address = ctypes.c_uint64()
        _driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self._num_bytes))
        self._own = address.value
        self._fill(address.value, 0, self._num_bytes)
        handle = _Handle()
        _driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def _open(self, handles: bytes) -> list[int]:
        """Map the memory of the other ranks, whose handles follow each other."""
        assert self._own is not None
        addresses = []
        for rank in range(self._comm.info.size):
            if rank == self._comm.info.rank:
                addresses.append(self._own)
                continue
            handle = _Handle.from_buffer_copy(handles, rank * _HANDLE_BYTES)
            address = ctypes.c_uint64()
            flags = ctypes.c_uint(_ENABLE_PEER_ACCESS)
            _driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, flags)
            self._opened.append(address.value)
            addresses.append(address.value)
        return addresses

    def _mark(self) -> None:
        """Write this rank's number into the memory of each rank."""
        rank = self._comm.info.rank
        for address in self.addresses:
            self._fill(address + rank, rank + 1, 1)

    def _check_marks(self) -> None:
        """Check that all ranks have written, and restore the zeros."""
        assert self._own is not None
        size = self._comm.info.size
        marks = ctypes.create_string_buffer(size)
        own = ctypes.c_uint64(self._own)
        _driver("cuMemcpyDtoH_v2", marks, own, ctypes.c_size_t(size))
        if marks.raw != bytes(range(1, size + 1)):
            raise PeerMemoryError(f"what other ranks write does not arrive: {list(marks.raw)}")
        self._fill(own.value, 0, size)

    def _fill(self, address: int, value: int, num_bytes: int) -> None:
        _driver(
            "cuMemsetD8_v2",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(num_bytes),
        )


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


def _driver(function: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver, in the context that torch has made.

    Raises:
        OSError: there is no driver.
        PeerMemoryError: the function failed.
    """
    result = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if result:
        raise PeerMemoryError(f"{function} failed with error {result} of CUDA")
