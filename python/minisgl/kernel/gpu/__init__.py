"""Kernels of a GPU, in Triton: the same functions, with the same arguments, as csrc/cpu.cpp.

What they compute is said in the wrappers one folder up, which call them. Read `launch.py`, then `norm.py`.
"""

from minisgl.kernel.gpu.activation import silu_and_mul
from minisgl.kernel.gpu.norm import add_rms_norm, rms_norm
from minisgl.kernel.gpu.rotary import rotate_and_store
from minisgl.kernel.gpu.sample import sample
from minisgl.kernel.gpu.tables import look_up, scatter

__all__ = ["add_rms_norm", "look_up", "rms_norm", "rotate_and_store", "sample", "scatter", "silu_and_mul"]
