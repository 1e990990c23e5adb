"""Kernels: each a Python wrapper that states its contract, with a torch or numpy reference.

The wrapper picks the implementation for the device of its tensors. On a CPU the reference is what runs.
"""

from minisgl.kernel.linear import CpuLinear
from minisgl.kernel.moe import moe_reference
from minisgl.kernel.noise import gumbel_noise
from minisgl.kernel.norm import rms_norm
from minisgl.kernel.radix import common_prefix_length
from minisgl.kernel.store import store_kv

__all__ = ["CpuLinear", "common_prefix_length", "gumbel_noise", "moe_reference", "rms_norm", "store_kv"]
