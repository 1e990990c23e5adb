"""For tests of the Triton kernels: device, tolerances, random numbers, a repaired interpreter."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import interpreter

from minisgl.kernel import gpu

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_for_new_numpy(tensor: type, scope: object) -> None:
    """Make a tensor of one number a loop's bound; numpy no longer takes its array for a number."""
    patch_tensor(tensor, scope)
    to_index = lambda self: self.handle.data.item()  # noqa: E731 - a method
    scope.set_attr(tensor, "__index__", to_index)  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = patch_tensor_for_new_numpy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # The interpreter runs one program after the other. These are enough that each context is split
    # and that some splits are empty.
    gpu.attention._PROGRAMS = 100
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# The interpreter multiplies no bfloat16.
DOT_DTYPES = list(DTYPES) if DEVICE.type == "cuda" else [torch.float32]


def same(actual: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def numbers(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=random, device=DEVICE).to(dtype)
