"""Calls captured as graphs, to be replayed by one call each: CUDA graphs, or `CpuGraph`s."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from minisgl.kernel import CannotBeCaptured, CpuGraphMemory, CpuKernels, unheld

ResultT = TypeVar("ResultT")


class Graph(Protocol):
    """A captured call."""

    def replay(self) -> None: ...


class GraphCapture(ABC):
    """Captures calls on one device."""

    @abstractmethod
    def rehearse(self, call: Callable[[], object]) -> None:
        """Call where captured calls run, so that what only a first call does is not captured."""

    @abstractmethod
    def capture(self, call: Callable[[], ResultT]) -> tuple[Graph, ResultT]:
        """Call, and capture what the call does. What it reads must lie where it lies now.

        Returns:
            the graph, and the result, which each replay makes anew in the same place.

        Raises:
            CannotBeCaptured: the call does what this device's graphs cannot repeat.
        """


class CudaGraphCapture(GraphCapture):
    """Captures CUDA graphs.

    They share one memory pool, since one runs after the other. What a graph leaves there is
    therefore valid until the next one is replayed. Large results are not kept alive: their memory
    serves the next graph too. Each graph is replayed once: that sends it to the device, which would
    take longer in the first step that needs it. They also share one stream: cuBLAS keeps 32 MiB
    until the process ends for each stream on which it multiplies. A rehearsal lets it take them
    outside the pool.

    A kernel that is first used in a capture is compiled and loaded then, which CUDA allows only in
    its mode "relaxed". So a rehearsal of each call is not needed; it would take as long as the
    capture. `torch.cuda.graph` is not used: it waits for the device before each capture, and frees
    memory of device and host that the next capture takes again.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def rehearse(self, call: Callable[[], object]) -> None:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()  # its memory is for the pool

    def capture(self, call: Callable[[], ResultT]) -> tuple[Graph, ResultT]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = call()
            finally:
                graph.capture_end()
        graph.replay()
        return graph, result


class CpuGraphCapture(GraphCapture):
    """Captures calls of compiled kernels.

    As on a GPU, all graphs share the memory of their intermediate results.

    Args:
        kernels: None if they could not be compiled; then nothing can be captured.
    """

    def __init__(self, kernels: CpuKernels | None) -> None:
        self._kernels = kernels
        self._memory = CpuGraphMemory()

    def rehearse(self, call: Callable[[], object]) -> None:
        """A capture computes what it writes down, so it is a first call itself."""

    def capture(self, call: Callable[[], ResultT]) -> tuple[Graph, ResultT]:
        if self._kernels is None:
            raise CannotBeCaptured("there are no compiled kernels")
        return self._kernels.capture(call, self._memory)


class _Memory:
    """What a tensor occupies, without holding it; torch reads its attribute."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"<i{size}",
            "shape": tuple(x.shape),
            "strides": tuple(size * stride for stride in x.stride()),
            "data": (x.data_ptr(), False),
        }


def unowned(x: Tensor) -> Tensor:
    """x itself, as a tensor that does not keep others from its memory."""
    if not x.is_cuda:
        return unheld(x)
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)
