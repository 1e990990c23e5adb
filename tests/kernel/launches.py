"""Records which variants of the Triton kernels are launched, with or without a GPU.

Triton compiles a kernel anew for other dtypes, for an int that is 1 or that 16 divides, for a
pointer that 16 bytes divide, for other compile-time constants and other numbers of warps. Its own
code says which variant a launch is; this needs no device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import jit
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_HOPPER = GPUTarget("cuda", 90, 32)


class Launches:
    """The variants of each kernel, by its name.

    Args:
        runs: names of the kernels that are also run, on any numbers, since others do not run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runs: Collection[str] = ()) -> None:
        self.variants: dict[str, set[str]] = {}
        for kind in (InterpretedFunction, JITFunction):
            monkeypatch.setattr(kind, "run", self._recorded(kind.run, runs))

    def _recorded(self, run: Callable[..., Any], runs: Collection[str]) -> Callable[..., Any]:
        def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            variant = triton_variant(kernel, *args, **options)
            self.variants.setdefault(kernel.__name__, set()).add(variant)
            if kernel.__name__ in runs:
                with np.errstate(over="ignore"):
                    return run(kernel, *args, grid=grid, warmup=warmup, **options)
            return None

        return record

    def take(self) -> dict[str, set[str]]:
        """The variants since the last call."""
        variants = self.variants
        self.variants = {}
        return variants


def triton_variant(kernel: Any, *args: Any, **options: Any) -> str:
    """What Triton compiles for a launch of a kernel; equal texts are one variant."""
    _, specialization, constants = _binder(kernel)(*args, **options)
    return f"{specialization} {constants}"


@cache
def _binder(kernel: Any) -> Callable[..., Any]:
    """From the arguments of a launch to what Triton tells variants apart by."""
    if isinstance(kernel, InterpretedFunction):
        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(_HOPPER)
    binder: Callable[..., Any] = jit.create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    return binder
