"""How these kernels follow each other: programmatic dependent launch.

A kernel may start while the one before it in the stream still runs, and waits for it with `wait_for_inputs` before it
reads what that one wrote. What comes before the wait (addresses, weights) is hidden behind the other kernel's end.
Every kernel here waits, so that the end of one means the end of all before it. On GPUs before Hopper, and in Triton's
interpreter, kernels simply run one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def pdl(x: Tensor) -> dict[str, Any]:
    """The launch options for the device of a kernel's tensors."""
    return _options(x.get_device()) if x.is_cuda else {"PDL": False}


@functools.cache
def _options(device: int) -> dict[str, Any]:
    has_it = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if has_it else {"PDL": False}
