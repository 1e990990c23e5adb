"""A captured call of compiled kernels is repeated where its memory lies, and nothing else is."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from minisgl.kernel import (
    CannotBeCaptured,
    CpuGraph,
    CpuGraphMemory,
    CpuKernels,
    add_rms_norm,
    load_cpu_kernels,
    rms_norm,
    unheld,
)

ResultT = TypeVar("ResultT")
WEIGHT_D = torch.rand(8)
EPS = 1e-5


@pytest.fixture
def kernels() -> CpuKernels:
    kernels = load_cpu_kernels()
    assert kernels is not None, "no compiler"
    return kernels


def capture(kernels: CpuKernels, call: Callable[[], ResultT]) -> tuple[CpuGraph, ResultT]:
    return kernels.capture(call, CpuGraphMemory())


def norm_twice(x_TD: Tensor) -> Tensor:
    return rms_norm(rms_norm(x_TD, WEIGHT_D, EPS), WEIGHT_D, EPS)


def test_a_replay_computes_from_what_now_lies_there(kernels: CpuKernels) -> None:
    x_TD = torch.rand(3, 8)
    graph, y_TD = capture(kernels, lambda: norm_twice(x_TD))
    assert torch.equal(y_TD, norm_twice(x_TD))
    for _ in range(3):
        x_TD.copy_(torch.rand(3, 8))
        graph.replay()
        assert torch.equal(y_TD, norm_twice(x_TD))


def test_a_replay_changes_its_arguments_again(kernels: CpuKernels) -> None:
    x_TD = torch.ones(1, 8)
    residual_TD = torch.zeros(1, 8)
    graph, _ = capture(kernels, lambda: add_rms_norm(x_TD, residual_TD, WEIGHT_D, EPS))
    graph.replay()
    graph.replay()
    assert residual_TD.tolist() == [[3.0] * 8]


def test_memory_of_a_graph_stays_its_own(kernels: CpuKernels) -> None:
    x_TD = torch.rand(64, 8)
    graph, y_TD = capture(kernels, lambda: norm_twice(x_TD))
    gc.collect()
    others = [torch.full((64, 8), 7.0) for _ in range(100)]
    graph.replay()
    assert all((other == 7).all() for other in others)
    assert torch.equal(y_TD, norm_twice(x_TD))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.sum().item(),
        lambda x: x.T.reshape(-1),
        lambda x: x.clone(),
        lambda x: x.new_zeros(3),
        lambda x: x.to(torch.bfloat16),
    ],
    ids=["add", "in place", "number", "copy of a view", "clone", "zeros", "cast"],
)
def test_what_torch_computes_is_not_captured(
    kernels: CpuKernels, compute: Callable[[Tensor], object]
) -> None:
    with pytest.raises(CannotBeCaptured, match="aten"):
        capture(kernels, lambda: compute(torch.rand(2, 3)))


def test_views_and_new_memory_may_be_made(kernels: CpuKernels) -> None:
    x_TD = torch.rand(4, 8)
    expected_D = norm_twice(x_TD)[2]

    def call() -> Tensor:
        _, second_TD = x_TD.split([2, 2])
        y_TD = torch.empty_like(second_TD.flatten().view(2, 8))
        kernels.rms_norm(second_TD.unflatten(1, (2, 4)).flatten(1), WEIGHT_D, EPS, y_TD)
        return rms_norm(y_TD, WEIGHT_D, EPS).unbind()[0]

    graph, y_D = capture(kernels, call)
    graph.replay()
    assert torch.equal(y_D, expected_D)


def test_memory_on_the_way_is_used_again_by_the_next_calls_and_the_next_graph(
    kernels: CpuKernels,
) -> None:
    def norm_often() -> Tensor:
        y_TD = x_TD
        for _ in range(10):
            y_TD = rms_norm(y_TD, WEIGHT_D, EPS)
        return y_TD

    memory = CpuGraphMemory()
    x_TD = torch.rand(3, 8)
    graphs = [kernels.capture(norm_often, memory) for _ in range(5)]
    assert memory.num_blocks == 6, "five results, and one more on the way"
    x_TD.copy_(torch.rand(3, 8))
    for graph, y_TD in graphs:
        graph.replay()
        assert torch.equal(y_TD, norm_often())


def test_a_view_keeps_the_memory_on_the_way(kernels: CpuKernels) -> None:
    x_TD = torch.rand(4, 8)

    def call() -> tuple[Tensor, Tensor]:
        first_TD = rms_norm(x_TD, WEIGHT_D, EPS)[1:]
        return first_TD, norm_twice(first_TD)

    graph, results = capture(kernels, call)
    x_TD.copy_(torch.rand(4, 8))
    graph.replay()
    for result, expected in zip(results, call(), strict=True):
        assert torch.equal(result, expected)


def test_a_result_that_nothing_holds_is_read_where_it_lies(kernels: CpuKernels) -> None:
    x_TD = torch.rand(3, 8)
    graph, y_TD = capture(kernels, lambda: norm_twice(x_TD)[1:, 2:])
    unheld_TD = unheld(y_TD)
    del y_TD
    x_TD.copy_(torch.rand(3, 8))
    graph.replay()
    assert torch.equal(unheld_TD, norm_twice(x_TD)[1:, 2:])


def test_another_threads_calls_are_not_captured(kernels: CpuKernels) -> None:
    x_TD = torch.ones(1, 8)
    other_TD = torch.zeros(1, 8)

    def add_in_a_thread() -> None:
        add_rms_norm(x_TD, other_TD, WEIGHT_D, EPS)

    def call() -> None:
        thread = threading.Thread(target=add_in_a_thread)
        thread.start()
        thread.join()

    graph, _ = capture(kernels, call)
    graph.replay()
    assert other_TD.tolist() == [[1.0] * 8], "once, by the thread"


def test_calls_through_another_object_of_the_library_are_captured(kernels: CpuKernels) -> None:
    """Two threads may have loaded the library at a time, and a layer keeps what it was given."""
    other = CpuKernels(kernels._library)
    x_TD = torch.rand(1, 8)
    y_TD = torch.empty(1, 8)
    graph, _ = capture(kernels, lambda: other.rms_norm(x_TD, WEIGHT_D, EPS, y_TD))
    y_TD.zero_()
    graph.replay()
    assert torch.equal(y_TD, rms_norm(x_TD, WEIGHT_D, EPS))


def test_calls_after_a_failed_capture_are_not_kept(kernels: CpuKernels) -> None:
    x_TD = torch.rand(1, 8)
    with pytest.raises(CannotBeCaptured):
        capture(kernels, lambda: x_TD + 1)
    assert torch.equal(norm_twice(x_TD), norm_twice(x_TD))
    graph, y_TD = capture(kernels, lambda: norm_twice(x_TD))
    graph.replay()
    assert torch.equal(y_TD, norm_twice(x_TD))
