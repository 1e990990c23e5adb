"""The tables, the KV pool and the backends, which all layers of a model share."""

# Dimensions: R rows of the tables, P pages, L positions of a sequence.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.attention.base import BaseAttnBackend
from minisgl.kvcache import MHAKVCache
from minisgl.moe.base import BaseMoeBackend


@dataclass(frozen=True, slots=True)
class Context:
    """The tables, the pool and the backends of one rank; made by the engine, passed to every layer.

    Attributes:
        page_table_RP: int32, the page that holds positions [p * page_size, (p + 1) * page_size)
            of a row.
        token_pool_RL: int32, the tokens of each row. A step reads there what the step before it
            sampled.
    """

    page_table_RP: Tensor
    token_pool_RL: Tensor
    kv_pool: MHAKVCache
    attn_backend: BaseAttnBackend
    moe_backend: BaseMoeBackend
