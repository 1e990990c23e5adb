"""Building blocks of a model, each aware of tensor parallelism.

An operator is built without weights, takes its shard of them from a `WeightSource` (`load`), and is
then called with tensors, the `Batch`, and the `Context`.

    base.py         operators: a tree that takes weights from a `WeightSource`
    context.py      `Context`: the tables, the KV pool and the backends, for every layer
    weights.py      how the weights of layers are held and multiplied
    embedding.py    token embedding and output head
    vocab_shard.py  a rank's part of the vocabulary, and how ranks agree on a token
    linear.py       linear layers, sharded by outputs or by inputs
    norm.py         norms with their weights
    rotary.py       rotary position embedding and its scalings
    attention.py    attention between its projections
    moe.py          a mixture-of-experts MLP: the router and this rank's experts

Read `base.py`, then `attention.py`.
"""

from minisgl.layers.attention import AttentionLayer, take_queries
from minisgl.layers.base import BaseOP, OPList, StateLessOP, WeightSource
from minisgl.layers.context import Context
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import (
    LinearColParallelMerged,
    LinearGated,
    LinearQKVMerged,
    LinearRowParallel,
)
from minisgl.layers.moe import MoELayer
from minisgl.layers.norm import FullWidthQKNorm, RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding, RotaryTables, get_rope, set_rope_device
from minisgl.layers.vocab_shard import VocabShard

__all__ = [
    "AttentionLayer",
    "BaseOP",
    "Context",
    "FullWidthQKNorm",
    "LinearColParallelMerged",
    "LinearGated",
    "LinearQKVMerged",
    "LinearRowParallel",
    "MoELayer",
    "OPList",
    "ParallelLMHead",
    "RMSNorm",
    "RMSNormFused",
    "RotaryEmbedding",
    "RotaryTables",
    "StateLessOP",
    "VocabParallelEmbedding",
    "VocabShard",
    "WeightSource",
    "take_queries",
    "get_rope",
    "set_rope_device",
]
