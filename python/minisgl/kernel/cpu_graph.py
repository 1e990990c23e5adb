"""Calls of the compiled kernels of a CPU, captured once and repeated by one call.

A decode of one token is a few hundred calls. Apart from products, each has a few microseconds of
work; as many go to Python, to the tensors that it makes, and to the way into the library. A
`CpuGraph` is to such a step what a CUDA graph is on a GPU. Its calls read and write the memory that
they did when they were captured, so the graph keeps this memory.
"""

from __future__ import annotations

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


class CannotBeCaptured(Exception):
    """A call computes something with torch, which a graph would not repeat."""


class CpuKernels:
    """The functions of a library, as attributes. Within `capture_calls` each call is kept too."""

    def __init__(self, library: tvm_ffi.Module) -> None:
        self._library = library
        self._captured: ContextVar[_Calls | None] = ContextVar("captured calls", default=None)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Found once for each function."""
        kernel = _Kernel(self._library.get_function(name), self._captured)
        setattr(self, name, kernel)
        return kernel

    def capture(self, call: Callable[[], ResultT]) -> tuple[CpuGraph, ResultT]:
        """Call once, and keep the calls of kernels.

        Returns:
            the graph, and the result, which each replay makes anew in the same place.

        Raises:
            CannotBeCaptured: torch computed something as well.
        """
        calls = _Calls()
        token = self._captured.set(calls)
        try:
            with _NothingIsComputed():  # type: ignore[no-untyped-call]
                result = call()
        finally:
            self._captured.reset(token)
        return CpuGraph(self._library.get_function("repeat"), calls), result


class CpuGraph:
    """Captured calls, in order, with their arguments."""

    def __init__(self, repeat: tvm_ffi.Function, calls: _Calls) -> None:
        self._repeat = repeat
        self._functions = tvm_ffi.convert(calls.functions)
        self._arguments = tvm_ffi.convert(calls.arguments)

    def replay(self) -> None:
        self._repeat(self._functions, self._arguments)


class _Calls:
    def __init__(self) -> None:
        self.functions: list[tvm_ffi.Function] = []
        self.arguments: list[tuple[Any, ...]] = []


class _Kernel:
    """One function of a library."""

    __slots__ = ("_captured", "_function")

    def __init__(self, function: tvm_ffi.Function, captured: ContextVar[_Calls | None]) -> None:
        self._function = function
        self._captured = captured

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)
        calls = self._captured.get()
        if calls is not None:
            calls.functions.append(self._function)
            calls.arguments.append(arguments)


class _NothingIsComputed(TorchDispatchMode):
    """Lets torch allocate memory and make views of it, and nothing else."""

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
            return result
        if func._schema.is_mutable or not _is_view(result, args):
            raise CannotBeCaptured(str(func))
        return result


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
