"""How the kernels follow each other on a stream: programmatic dependent launch (PDL).

A kernel may start while the previous kernel of the stream still runs. It calls `wait_for_inputs`
before it reads what that kernel wrote. The work before the wait (addresses, weights) overlaps the
end of the previous kernel. Every kernel here waits before it lets the next one start: when one has
started, all but the one before it have ended. So it may read before the wait what any kernel but
that one wrote, if that one is of this package or is launched without PDL.
On GPUs before Hopper, and in Triton's interpreter, kernels run one after the other.
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
    """Wait for the kernel before this one, and let the kernel after it start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def pdl(x: Tensor) -> dict[str, Any]:
    """Return the launch options for the device of a kernel's tensors."""
    return _options(x.get_device()) if x.is_cuda else {"PDL": False}


def num_processors(x: Tensor) -> int:
    """Return how many multiprocessors the device of a kernel's tensors has."""
    return _num_processors(x.get_device()) if x.is_cuda else 1


@functools.cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _options(device: int) -> dict[str, Any]:
    is_supported = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if is_supported else {"PDL": False}
