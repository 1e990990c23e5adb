"""Building blocks of a model, each aware of tensor parallelism.

Dimension key, for layers, models, attention and kernel: `T` tokens in the batch, `B` requests, `D` model width,
`N` query heads, `K` kv heads, `H` head dim, `F` mlp width, `V` vocab, `S` kv slots, `P` pages, `E` experts,
`A` experts a token. Letters name the logical size, not a rank's shard.

An op is built without weights, takes its own part of them from a `WeightSource` (`load`), and is then called with
tensors, the `Batch`, and the `Context`. Read `base.py`, then `attention.py`.
"""

from minisgl.checkpoint import RotaryConfig
from minisgl.kernel import gelu_and_mul, silu_and_mul
from minisgl.layers.attention import AttentionLayer
from minisgl.layers.base import BaseOP, OPList, StateLessOP, WeightSource
from minisgl.layers.context import Context
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.layers.moe import MoELayer
from minisgl.layers.norm import FullWidthQKNorm, RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding, RotaryTables, get_rope, set_rope_device

__all__ = [
    "AttentionLayer",
    "BaseOP",
    "Context",
    "FullWidthQKNorm",
    "LinearColParallelMerged",
    "LinearQKVMerged",
    "LinearRowParallel",
    "MoELayer",
    "OPList",
    "ParallelLMHead",
    "RMSNorm",
    "RMSNormFused",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryTables",
    "StateLessOP",
    "VocabParallelEmbedding",
    "WeightSource",
    "gelu_and_mul",
    "get_rope",
    "set_rope_device",
    "silu_and_mul",
]
