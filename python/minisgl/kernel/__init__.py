"""Kernels: each is a function with one contract, and has a reference in plain torch for its tests.

A wrapper holds the contract and picks the implementation by device and dtype (`dispatch.py`):

    csrc/cpu*.cpp   a CPU with a compiler
    gpu/            a GPU, in Triton
    csrc/*.cu       a GPU, for what Triton cannot express
    the reference   everything else, and the oracle of the tests

The wrappers, and what they need:

    dispatch.py          picks the implementation that takes a tensor
    native.py            loads the libraries of csrc/
    cpu_graph.py         captures calls of compiled kernels of a CPU, and repeats them
    embedding.py         rows of an embedding
    norm.py              root-mean-square norm
    cpu_products.py      products with a weight on a CPU, by number of tokens
    gpu_products.py      products with a weight on a GPU, by number of tokens
    linear_tiles.py      how a GPU divides those of some tokens
    row_tiles.py         how a Hopper GPU divides those of some tokens with a large weight
    activation.py        gated activations
    rotary.py            head norms, rotary embedding and KV store
    store.py             puts keys and values into their slots
    attention.py         attention of prompts and decodes, and softmax of a prompt's scores
    decode_attention.py  attention of decodes on a GPU, its work divided evenly
    shared_prefix.py     attention of decodes to prefixes that they share, on a GPU
    moe.py               mixture of experts: routing, the reference
    expert_tiles.py      the sizes of tiles of experts on a GPU
    all_reduce.py        sums over ranks through memory of peers
    mask.py              bans tokens by grammar masks
    filters.py           top_k, top_p, min_p
    segments.py          the size of a segment of the vocabulary
    sample.py            chooses tokens, with noise by seed, position, and segment or token
    tables.py            writes and reads the device's page table and token pool

C++ of a CPU:

    csrc/cpu.h                     the common part of the kernels of a CPU
    csrc/cpu.cpp                   the steps between matrix products
    csrc/cpu_linear.cpp            the product of a few tokens with a weight
    csrc/cpu_unit_linear.h         that of any number of tokens, in a processor's matrix unit
    csrc/cpu_matrix_unit.h         the matrix unit itself, Intel's AMX
    csrc/transpose.h               transposes a square block of vectors
    csrc/cpu_totals.h              adds up the lanes of vectors
    csrc/divided_loop.h            a loop that threads divide while it runs
    csrc/cpu_pages.h               keys and values of a sequence in their pages, block after block
    csrc/cpu_decode_attention.cpp  attention of decodes
    csrc/cpu_unit_decode.h         that of a block of keys, in a processor's matrix unit
    csrc/cpu_query_sums.h          running sums of the queries of decodes
    csrc/cpu_prompt_attention.cpp  attention of prompts
    csrc/cpu_sample.cpp            from logits to tokens: filters and choice
    csrc/cpu_graph.cpp             repeats captured calls

CUDA of a GPU:

    csrc/launch.cuh            how the functions that Python calls launch a kernel
    csrc/ptx.cuh               PTX instructions, as functions
    csrc/linear.cu             the product of a few tokens with a weight
    csrc/small_linear.cu       that with a small weight, also of gate and up with the activation
    csrc/linear.cuh            the common part of these two
    csrc/row_tiles.cu          some tokens with a large weight, also with the activation, on Hopper
    csrc/gated_tiles.cu        many tokens with gate and up, and the activation, on Hopper
    csrc/stages.cuh            stages of shared memory in turn, as these two have them
    csrc/hopper.cuh            instructions that Hopper alone has
    csrc/decode_attention.cu   attention of decodes: each warp reads as many tokens as the others
    csrc/decode_ranges.cuh     what a warp does with its range of the contexts
    csrc/decode_warp.cuh       what a warp does with tiles of a context
    csrc/cluster_attention.cu  a few decodes: a cluster of blocks for each kv head of a request
    csrc/all_reduce.cu         sums over ranks: push, one-shot, two-shot
    csrc/all_reduce_rows.cuh   sums of rows, with the norm that follows
    csrc/peer_sums.cuh         adds up what has arrived from all ranks
    csrc/peer_memory.cuh       the memory of each rank that all ranks write, and its channels
    csrc/filters.cu            the smallest logit that the filters keep

FlashInfer's FlashAttention 3 of prompts on Hopper, as one model uses it:

    csrc/hopper/entry.cpp    what Python calls
    csrc/hopper/steps.h      the arguments that entry.cpp passes to the launcher and to the plan
    csrc/hopper/plan.cu      plans which multiprocessor computes which tile
    csrc/hopper/sizes.h      sizes of tiles, and the arguments of a kernel
    csrc/hopper/launch.cu    starts the kernels
    csrc/hopper/cubins.S     puts the compiled kernels into the library
    csrc/hopper/prompts.cuh  the types of both kernels
    csrc/hopper/ragged.cu    the kernel of prompts whose keys are those of the batch
    csrc/hopper/paged.cu     the kernel of prompts whose keys are in pages
    csrc/hopper/loads.cuh    how queries, keys and values come to shared memory
    csrc/hopper/output.cuh   how the output comes to global memory

A header that stands in for CUTLASS's of the same name, which includes all GEMMs:

    csrc/hopper/light/cutlass/gemm/collective/collective_builder.hpp  what FlashAttention 3 uses

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
    attend_prompts_on_device,
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
from minisgl.kernel.cpu_products import CpuLinear, most_of_cpu_kernel, sizes_without_padding
from minisgl.kernel.decode_attention import BalancedDecode
from minisgl.kernel.dispatch import (
    can_have_cuda_kernels,
    cuda_kernels_for,
    kernels_for,
    triton_kernels_for,
)
from minisgl.kernel.embedding import embed, take_rows
from minisgl.kernel.expert_tiles import MOST_PAIRS_AT_ONCE, ExpertTiles, ProductTile
from minisgl.kernel.filters import has_filter_kernels, lowest_kept, lowest_kept_reference
from minisgl.kernel.gpu_products import (
    gpu_linear,
    gpu_linear_in_parts,
    gpu_linear_silu,
    gpu_linear_tile,
    gpu_row_tile,
)
from minisgl.kernel.linear_tiles import LinearTile, tiled_sizes
from minisgl.kernel.mask import mask_logits, mask_logits_reference
from minisgl.kernel.moe import chosen_experts, moe_reference, route, route_reference
from minisgl.kernel.native import load_cpu_kernels
from minisgl.kernel.norm import (
    add_parts_rms_norm,
    add_rms_norm,
    parts_rms_norm,
    residual_norm,
    rms_norm,
    rms_norm_reference,
)
from minisgl.kernel.rotary import HeadNorms, Rotation, rotate, rotate_and_store, split_heads
from minisgl.kernel.row_tiles import RowTile, sizes_in_rows
from minisgl.kernel.sample import choose_scored_tokens, choose_tokens, gumbel_noise
from minisgl.kernel.segments import SEGMENT_SIZE
from minisgl.kernel.shared_prefix import (
    GroupTensors,
    PrefixParts,
    PrefixPlan,
    attend_shared_prefixes,
    plan_shared_prefixes,
)
from minisgl.kernel.store import store_kv
from minisgl.kernel.tables import look_up, scatter

__all__ = [
    "MOST_PAIRS_AT_ONCE",
    "SEGMENT_SIZE",
    "BalancedDecode",
    "CannotBeCaptured",
    "CpuGraph",
    "CpuGraphMemory",
    "CpuKernels",
    "CpuLinear",
    "ExpertTiles",
    "GroupTensors",
    "HeadNorms",
    "LinearTile",
    "RowTile",
    "PeerSum",
    "PrefixParts",
    "PrefixPlan",
    "ProductTile",
    "Protocol",
    "Rotation",
    "add_parts_rms_norm",
    "add_rms_norm",
    "attend_decode",
    "attend_decode_reference",
    "attend_prompts",
    "attend_prompts_on_device",
    "attend_prompts_reference",
    "attend_shared_prefixes",
    "can_have_cuda_kernels",
    "causal_softmax",
    "choose_scored_tokens",
    "choose_tokens",
    "chosen_experts",
    "cuda_kernels_for",
    "embed",
    "gelu_and_mul",
    "gpu_linear",
    "gpu_linear_in_parts",
    "gpu_linear_silu",
    "gpu_linear_tile",
    "gpu_row_tile",
    "gumbel_noise",
    "has_filter_kernels",
    "kernels_for",
    "load_cpu_kernels",
    "look_up",
    "lowest_kept",
    "lowest_kept_reference",
    "mask_logits",
    "most_of_cpu_kernel",
    "mask_logits_reference",
    "memory_bytes",
    "moe_reference",
    "parts_rms_norm",
    "peer_sum_kernels",
    "plan_shared_prefixes",
    "residual_norm",
    "rms_norm",
    "rms_norm_reference",
    "rotate",
    "rotate_and_store",
    "route",
    "route_reference",
    "scatter",
    "silu_and_mul",
    "sizes_in_rows",
    "sizes_without_padding",
    "split_heads",
    "store_kv",
    "sum_reference",
    "take_rows",
    "tiled_sizes",
    "triton_kernels_for",
    "unheld",
]
