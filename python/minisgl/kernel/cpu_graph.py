"""Calls of the compiled kernels of a CPU, captured once and repeated by one call.

A decode of one token is a few hundred calls. Apart from products, each has a few microseconds of
work, and costs as many again in Python, for the tensors that it makes and the call into the
library. A `CpuGraph` does for such a step what a CUDA graph does on a GPU. Its calls read and write
the same memory as when they were captured, so the graph keeps that memory alive. Intermediate
results lie in a `CpuGraphMemory`, which the next layer reuses while it is in the processor's cache.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import tvm_ffi
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ResultT = TypeVar("ResultT")

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    }
)


# Of this thread. Not of a `CpuKernels`: several objects may call one library.
_CAPTURED: ContextVar[_Calls | None] = ContextVar("captured calls", default=None)


class CannotBeCaptured(Exception):
    """A call computes something with torch, which a graph would not repeat."""


class CpuGraphMemory:
    """Memory for intermediate results of captured calls, reused once no tensor lies there.

    Graphs may share it if one is replayed after the other. A result that no tensor holds is then
    valid until the next replay.
    """

    def __init__(self) -> None:
        self._addresses: set[int] = set()
        self._free: list[Tensor] = []

    @property
    def num_blocks(self) -> int:
        return len(self._addresses)

    def place(self, x: Tensor) -> Tensor:
        """A tensor like x, of any content, in this memory."""
        num_bytes = x.untyped_storage().nbytes()
        if num_bytes == 0:
            return x
        block = self._take(num_bytes)
        lease = block.numpy()[:num_bytes]  # which lives as long as a tensor in it
        weakref.finalize(lease, self._free.append, block).atexit = False
        return torch.from_numpy(lease).view(x.dtype).as_strided(x.shape, x.stride())

    def lend(self, x: Any) -> Any:
        """A tensor in this memory without holding it; anything else as it is."""
        return unheld(x) if isinstance(x, Tensor) and _memory(x) in self._addresses else x

    def _take(self, num_bytes: int) -> Tensor:
        """The smallest free block that has room."""
        fitting = [i for i, block in enumerate(self._free) if len(block) >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        block = torch.empty(num_bytes, dtype=torch.uint8)
        self._addresses.add(block.data_ptr())
        return block


class CpuKernels:
    """The functions of a library, as attributes. During a `capture` each call is kept too."""

    def __init__(self, library: tvm_ffi.Module) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Look the function up, once."""
        kernel = _Kernel(self._library.get_function(name))
        setattr(self, name, kernel)
        return kernel

    def capture(
        self, call: Callable[[], ResultT], memory: CpuGraphMemory
    ) -> tuple[CpuGraph, ResultT]:
        """Call once, and keep the calls of kernels.

        Returns:
            the graph, and the result, which each replay computes anew in the same memory.

        Raises:
            CannotBeCaptured: torch computed something as well.
        """
        calls = _Calls(memory)
        token = _CAPTURED.set(calls)
        try:
            with _NothingIsComputed(memory):
                result = call()
        finally:
            _CAPTURED.reset(token)
        return CpuGraph(self._library.get_function("repeat"), calls), result


class CpuGraph:
    """Captured calls, in order, with their arguments."""

    def __init__(self, repeat: tvm_ffi.Function, calls: _Calls) -> None:
        self._repeat = repeat
        self._memory = calls.memory
        self._functions = tvm_ffi.convert(calls.functions)
        self._arguments = tvm_ffi.convert(calls.arguments)

    def replay(self) -> None:
        self._repeat(self._functions, self._arguments)


class _Calls:
    def __init__(self, memory: CpuGraphMemory) -> None:
        self.memory = memory
        self.functions: list[tvm_ffi.Function] = []
        self.arguments: list[tuple[Any, ...]] = []

    def keep(self, function: tvm_ffi.Function, arguments: tuple[Any, ...]) -> None:
        self.functions.append(function)
        self.arguments.append(tuple(self.memory.lend(argument) for argument in arguments))


class _Kernel:
    """One function of a library."""

    __slots__ = ("_function",)

    def __init__(self, function: tvm_ffi.Function) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        result = self._function(*arguments)
        calls = _CAPTURED.get()
        if calls is not None:
            calls.keep(self._function, arguments)
        return result


class _NothingIsComputed(TorchDispatchMode):
    """Lets torch allocate memory and make views of it, and nothing else."""

    def __init__(self, memory: CpuGraphMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph_memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped by torch's compiler, whose import takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            return self._graph_memory.place(result)
        if func._schema.is_mutable or not _is_view(result, args):
            raise CannotBeCaptured(str(func))
        return result


def unheld(x: Tensor) -> Tensor:
    """A tensor of the same memory that does not keep it alive."""
    storage = x.untyped_storage()
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    bytes_of_x = torch.frombuffer(memory, dtype=torch.uint8)
    return bytes_of_x.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result is one or several tensors that lie in the memory of an argument."""
    memory = {_memory(x) for x in tree_leaves(args) if isinstance(x, Tensor)} - {None}
    results = tree_leaves(result)
    if not results:
        return False
    return all(isinstance(x, Tensor) and _memory(x) in memory for x in results)


def _memory(x: Tensor) -> int | None:
    """Where a tensor's memory begins; None for the layout of another library: packed weights."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else None
