"""Kernels of a GPU, in Triton, with the arguments that csrc/cpu.cpp takes.

The contract of each function stands in the wrapper one folder up that calls it. In the kernels, a
name in capitals is a compile-time constant; one that ends in _2 is rounded up to a power of two.
An index has the small letter of its dimension.

    launch.py       how Triton's kernels are launched, one after the other
    norm.py        root-mean-square norm
    linear.py      the product of one token with a weight
    tiled_products.py  those of some tokens, in small tiles
    activation.py  gated activations
    rotary.py      head norms, rotary embedding and KV store
    attention.py   attention of decodes, in splits
    prompt_attention.py  attention of prompts, in tiles
    shared_prefix.py  attention of decodes to prefixes that they share
    experts.py     mixture of experts, routed on the device
    expert_pairs.py     its pairs of a token and an expert, sorted by experts
    expert_products.py  their products with the weights
    mask.py        bans tokens by grammar masks
    sample.py      samples in two launches
    tables.py      page table and token pool

Read `launch.py`, then `norm.py`.
"""

from minisgl.kernel.gpu.activation import silu_and_mul
from minisgl.kernel.gpu.attention import attend_decode
from minisgl.kernel.gpu.expert_pairs import PairBlocks, sort_pairs
from minisgl.kernel.gpu.expert_products import multiply_blocks
from minisgl.kernel.gpu.experts import moe_by_expert, moe_by_token, route
from minisgl.kernel.gpu.launch import is_hopper, num_processors, shared_bytes
from minisgl.kernel.gpu.linear import one_token_linear, one_token_silu
from minisgl.kernel.gpu.mask import mask_logits
from minisgl.kernel.gpu.norm import add_parts_rms_norm, add_rms_norm, parts_rms_norm, rms_norm
from minisgl.kernel.gpu.prompt_attention import attend_prompts_on_device
from minisgl.kernel.gpu.rotary import rotate_and_store
from minisgl.kernel.gpu.sample import choose_scored_tokens, choose_tokens
from minisgl.kernel.gpu.shared_prefix import attend_shared_prefixes, plan_shared_prefixes
from minisgl.kernel.gpu.tables import list_pages, look_up, scatter
from minisgl.kernel.gpu.tiled_products import tiled_linear, tiled_silu

__all__ = [
    "PairBlocks",
    "add_parts_rms_norm",
    "add_rms_norm",
    "attend_decode",
    "attend_prompts_on_device",
    "attend_shared_prefixes",
    "choose_scored_tokens",
    "choose_tokens",
    "is_hopper",
    "list_pages",
    "look_up",
    "mask_logits",
    "moe_by_expert",
    "moe_by_token",
    "multiply_blocks",
    "num_processors",
    "one_token_linear",
    "one_token_silu",
    "parts_rms_norm",
    "plan_shared_prefixes",
    "rms_norm",
    "rotate_and_store",
    "route",
    "scatter",
    "shared_bytes",
    "silu_and_mul",
    "sort_pairs",
    "tiled_linear",
    "tiled_silu",
]
