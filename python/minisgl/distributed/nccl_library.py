"""NCCL's library, called through ctypes: the functions that a communicator needs, and no other.

Argument types are declared and results are checked. NCCL's documentation says what a collective
does; `nccl_communicator.py` says on which stream and in which order.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import torch

NCCL_SUM = 0  # of ncclRedOp_t
NCCL_MIN = 3
# Of ncclDataType_t. A bool has no sum in it, so there is none.
NCCL_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}

_NAME = "libnccl.so.2"
_ID_BYTES = 128


class NcclError(Exception):
    """A function of NCCL failed, or there is no NCCL."""


class UniqueId(ctypes.Structure):
    """The id of a group: rank 0 makes it and the other ranks get a copy."""

    _fields_ = (("bytes", ctypes.c_byte * _ID_BYTES),)


# Without ncclComm_t and cudaStream_t, which are addresses.
_SEND_OR_RECV = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    # From, to, count, dtype; then the operation or the root; communicator and stream.
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    # Address, count, dtype, the other rank; communicator and stream.
    "ncclSend": _SEND_OR_RECV,
    "ncclRecv": _SEND_OR_RECV,
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


def load_nccl(name: str = _NAME) -> Any:
    """Load NCCL. Its functions then raise NcclError with NCCL's own message.

    Where torch uses NCCL it has loaded it already, and this is the same library.

    Raises:
        NcclError: there is no such library, or it lacks a function.
    """
    try:
        library = ctypes.CDLL(name)
        library.ncclGetErrorString.argtypes = (c_int,)
        library.ncclGetErrorString.restype = c_char_p
        library.ncclGetLastError.argtypes = (c_void_p,)
        library.ncclGetLastError.restype = c_char_p
        for function_name, types in _ARGUMENTS.items():
            function = getattr(library, function_name)
            function.argtypes = types
            function.restype = c_int
            function.errcheck = _Check(library, function_name)
    except (OSError, AttributeError) as error:
        raise NcclError(f"NCCL cannot be loaded: {error}") from None
    return library


def nccl_version(library: Any) -> str:
    """Return the version of NCCL, such as 2.28.9."""
    version = c_int()
    library.ncclGetVersion(ctypes.byref(version))
    major, rest = divmod(version.value, 10_000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


class _Check:
    """Raises NcclError if a function has returned a failure."""

    def __init__(self, library: Any, function_name: str) -> None:
        self._library = library
        self._function_name = function_name

    def __call__(self, result: int, _function: Any, _arguments: tuple[Any, ...]) -> int:
        if result:
            words = self._library.ncclGetErrorString(result).decode()
            details = self._library.ncclGetLastError(None).decode(errors="replace")
            message = f"{self._function_name} failed: {words}"
            raise NcclError(f"{message}: {details}" if details else message)
        return result
