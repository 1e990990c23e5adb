"""Calls captured as CUDA graphs, to be replayed by one call each.

Graphs share one pool of memory, since one runs after the other. What a graph leaves there is
therefore valid until the next one is replayed. Large results are not kept alive: their memory
serves the next graph too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


def capture(call: Callable[[], ResultT], pool: Any) -> tuple[torch.cuda.CUDAGraph, ResultT]:
    """Call once, then capture what is launched. What is read must lie where it lies now.

    Args:
        pool: of memory, from `torch.cuda.graph_pool_handle`.

    Returns:
        the graph, and the result, which each replay makes anew in the same place.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what is compiled or allocated once is not to be captured
    torch.cuda.current_stream().wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    # NCCL's threads go on while this one captures.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return graph, result


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
        return x
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)
