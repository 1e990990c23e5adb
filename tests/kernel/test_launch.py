"""Remembered kernels tell apart what Triton does, and ask it once for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
import triton
import triton.language as tl

from minisgl.kernel.gpu import launch
from minisgl.kernel.gpu.launch import RememberedKernel
from tests.kernel.launches import triton_variant


@triton.jit
def kernel(a, b, c, SIZE: tl.constexpr, PDL: tl.constexpr):
    pass


class Compiled:
    """Stands in for what Triton compiled: writes down its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


class Function:
    """Stands in for a function of Triton."""

    arg_names = ("a", "b", "c", "SIZE", "PDL")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.device_caches: dict[int, object] = {0: "what was compiled"}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


def test_triton_is_asked_once_for_equal_variants() -> None:
    function = Function()
    remembered = RememberedKernel(function)
    x = torch.zeros(64)

    remembered[(3,)](x, 5, 0.5, PDL=False, SIZE=8, num_warps=4)
    remembered[(4, 2)](x[4:], 7, 0.25, PDL=False, SIZE=8, num_warps=4)

    (compiled,) = function.compiled
    ((grid, arguments),) = compiled.launches  # the first launch was Triton's
    assert grid[:3] == (4, 2, 1)
    assert arguments[0].data_ptr() == x[4:].data_ptr()
    assert arguments[1:] == (7, 0.25, 8, False), "constants stand as in the signature"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((torch.zeros(64)[1:], 5, 0.5), {}),
        ((torch.zeros(64).half(), 5, 0.5), {}),
        ((torch.zeros(64), 1, 0.5), {}),
        ((torch.zeros(64), 32, 0.5), {}),
        ((torch.zeros(64), 1 << 31 | 1, 0.5), {}),
        ((torch.zeros(64), 5, 2), {}),
        ((torch.zeros(64), 5, 0.5), {"SIZE": 16}),
        ((torch.zeros(64), 5, 0.5), {"num_warps": 8}),
    ],
)
def test_triton_is_asked_for_other_variants(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    function = Function()
    remembered = RememberedKernel(function)
    usual = {"SIZE": 8, "PDL": False, "num_warps": 4}

    remembered[(1,)](torch.zeros(64), 5, 0.5, **usual)
    remembered[(1,)](*arguments, **{**usual, **options})

    assert len(function.compiled) == 2


def test_what_is_forgotten_is_compiled_again() -> None:
    function = Function()
    remembered = RememberedKernel(function)
    for _ in range(2):
        remembered[(1,)](torch.zeros(64), 5, 0.5, SIZE=8, PDL=False)
        remembered.forget()
    assert len(function.compiled) == 2
    assert not function.device_caches


def tensors() -> st.SearchStrategy[Tensor]:
    dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8])
    memory = torch.zeros(1024, dtype=torch.uint8)
    return st.builds(lambda dtype, i: memory[8 * i :].view(dtype), dtypes, st.integers(0, 5))


ints = st.sampled_from([0, 1, 2, 15, 16, 17, -16, -1, 2**31 - 1, 2**31, 2**31 + 1, 2**40, -(2**40)])
arguments = st.one_of(tensors(), ints, st.floats(-1, 1), st.booleans())


@example((True, 1))
@settings(deadline=None)
@given(st.tuples(arguments, arguments))
def test_what_triton_tells_apart_is_told_apart(pair: tuple[Any, Any]) -> None:
    first, second = pair
    if launch._variant(first) == launch._variant(second):
        assert triton_variant(kernel, first, 0, 0, SIZE=1, PDL=False) == triton_variant(
            kernel, second, 0, 0, SIZE=1, PDL=False
        )


@pytest.mark.parametrize("number", range(1, 70))
def test_next_power_of_2_is_that_of_triton(number: int) -> None:
    assert launch.next_power_of_2(number) == triton.next_power_of_2(number)
