"""For tests of the Triton kernels: device, tolerances, random numbers, a repaired interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

import tests.kernel.interpreter  # noqa: F401 - repairs it
from minisgl.kernel import gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # The interpreter runs one program after the other. These are enough that contexts of a few
    # requests are split, and that some splits are empty.
    gpu.attention._PROGRAMS = 40
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# The interpreter multiplies no bfloat16.
DOT_DTYPES = list(DTYPES) if DEVICE.type == "cuda" else [torch.float32]


def same(actual: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def numbers(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=random, device=DEVICE).to(dtype)
