"""Kernels: each a function with one contract, and a reference in plain torch to be compared with.

A wrapper holds the contract and picks the implementation by device and dtype (`dispatch.py`):

    csrc/cpu*.cpp   a CPU with a compiler
    gpu/            a GPU, in Triton
    csrc/*.cu       a GPU, for what Triton cannot express
    the reference   everything else, and the oracle of the tests

Nothing here knows of requests or models. Read `norm.py` for the pattern, then `rotary.py`.
"""

from minisgl.kernel.activation import gelu_and_mul, silu_and_mul
from minisgl.kernel.all_reduce import (
    PeerSum,
    Protocol,
    memory_bytes,
    peer_sum_kernels,
    sum_reference,
)
from minisgl.kernel.attention import (
    attend_decode,
    attend_decode_reference,
    attend_prompts,
    attend_prompts_reference,
    causal_softmax,
)
from minisgl.kernel.cpu_graph import (
    CannotBeCaptured,
    CpuGraph,
    CpuGraphMemory,
    CpuKernels,
    unheld,
)
from minisgl.kernel.decode_attention import BalancedDecode
from minisgl.kernel.dispatch import cuda_kernels_for, kernels_for, triton_kernels_for
from minisgl.kernel.embedding import embed, take_rows
from minisgl.kernel.expert_tiles import MOST_PAIRS_AT_ONCE, ExpertTiles, ProductTile
from minisgl.kernel.filters import has_filter_kernels, lowest_kept, lowest_kept_reference
from minisgl.kernel.linear import CpuLinear, gpu_linear, gpu_linear_silu, sizes_without_padding
from minisgl.kernel.mask import mask_logits, mask_logits_reference
from minisgl.kernel.moe import chosen_experts, moe_reference, route, route_reference
from minisgl.kernel.native import load_cpu_kernels
from minisgl.kernel.norm import add_rms_norm, residual_norm, rms_norm, rms_norm_reference
from minisgl.kernel.rotary import HeadNorms, Rotation, rotate, rotate_and_store, split_heads
from minisgl.kernel.sample import choose_scored_tokens, choose_tokens, gumbel_noise
from minisgl.kernel.store import store_kv
from minisgl.kernel.tables import look_up, scatter

__all__ = [
    "MOST_PAIRS_AT_ONCE",
    "BalancedDecode",
    "CannotBeCaptured",
    "CpuGraph",
    "CpuGraphMemory",
    "CpuKernels",
    "CpuLinear",
    "ExpertTiles",
    "HeadNorms",
    "PeerSum",
    "ProductTile",
    "Protocol",
    "Rotation",
    "add_rms_norm",
    "attend_decode",
    "attend_decode_reference",
    "attend_prompts",
    "attend_prompts_reference",
    "causal_softmax",
    "choose_scored_tokens",
    "choose_tokens",
    "chosen_experts",
    "cuda_kernels_for",
    "embed",
    "gelu_and_mul",
    "gpu_linear",
    "gpu_linear_silu",
    "gumbel_noise",
    "has_filter_kernels",
    "kernels_for",
    "load_cpu_kernels",
    "look_up",
    "lowest_kept",
    "lowest_kept_reference",
    "mask_logits",
    "mask_logits_reference",
    "memory_bytes",
    "moe_reference",
    "peer_sum_kernels",
    "residual_norm",
    "rms_norm",
    "rms_norm_reference",
    "rotate",
    "rotate_and_store",
    "route",
    "route_reference",
    "scatter",
    "silu_and_mul",
    "sizes_without_padding",
    "split_heads",
    "store_kv",
    "sum_reference",
    "take_rows",
    "triton_kernels_for",
    "unheld",
]
