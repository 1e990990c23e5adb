"""The parts of all models: an embedding, a stack of layers, a last norm, an output head.

An architecture's file writes its decoder layer, and names it in a subclass of `BaseLLMModel`.
Attributes are named as the checkpoint names its weights; a merged layer (`qkv_proj`,
`gate_up_proj`) reads the weights of several names. Next to read: `blocks.py`, then
`qwen3.py`.
"""

# Dimensions: B requests of a step, D model width, T tokens of a step, V vocabulary, Y tokens whose
#     hidden states are returned.

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator, PartialSum
from minisgl.errors import CheckpointError
from minisgl.layers import (
    BaseOP,
    Context,
    OPList,
    ParallelLMHead,
    RMSNormFused,
    RotaryTables,
    VocabParallelEmbedding,
    take_queries,
)

_BIASES = ("attention_bias", "mlp_bias")
_HEAD = "lm_head"  # as checkpoints call it
# What is to be added to the residual stream; a `PartialSum` is first summed over the ranks.
Addend: TypeAlias = Tensor | PartialSum


class DecoderLayer(BaseOP, ABC):
    """One layer: two sublayers, whose outputs are added to the residual stream.

    The stream is x + residual; a residual of None stands for zero. x may be a `PartialSum`, which
    is still to be summed over the ranks. x and residual are kept apart because the next norm does
    both additions.

    Args:
        layer: its number, from 0.
        ropes: where layers find their rotary tables.
    """

    @abstractmethod
    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        ropes: RotaryTables,
        comm: DistributedCommunicator,
    ) -> None: ...

    @abstractmethod
    def attention_sublayer(
        self, x_TD: Addend, residual_TD: Tensor | None, batch: Batch, ctx: Context
    ) -> tuple[Addend, Tensor | None]:
        """Attention and its norms: tokens attend to each other.

        Returns:
            x of the tokens that attend (`batch.queries`), and residual of all tokens.
        """

    @abstractmethod
    def mlp_sublayer(
        self, x_TD: Addend, residual_TD: Tensor | None, ctx: Context
    ) -> tuple[Addend, Tensor | None]:
        """The MLP and its norms: each token is computed by itself."""


class Decoder(BaseOP):
    """Embedding, layers, last norm."""

    def __init__(
        self, config: ModelConfig, layers: list[DecoderLayer], comm: DistributedCommunicator
    ) -> None:
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.width,
            comm,
            tied_name=_HEAD if config.tied_embeddings else None,
        )
        self.layers = OPList(layers)
        self.norm = RMSNormFused(config.width, config.norm_eps)

    def forward(self, batch: Batch, ctx: Context) -> Tensor:
        """x_YD, the normed last hidden states of the tokens of `batch.returned`."""
        ctx.attn_backend.prepare_on_device(batch.queries)
        x_TD: Addend = self.embed_tokens.forward(batch.input_ids_T)
        residual_TD: Tensor | None = None
        *layers, last = self.layers
        for layer in layers:
            x_TD, residual_TD = layer.attention_sublayer(x_TD, residual_TD, batch, ctx)
            x_TD, residual_TD = layer.mlp_sublayer(x_TD, residual_TD, ctx)

        # Tokens attend to each other for the last time. From here on only those count whose hidden
        # states are returned.
        if batch.returned is not None:
            batch = replace(batch, queries=batch.returned)
            ctx.attn_backend.prepare_on_device(batch.queries)
        x_YD, residual_TD = last.attention_sublayer(x_TD, residual_TD, batch, ctx)
        residual_YD = None if residual_TD is None else take_queries(residual_TD, batch.queries)
        x_YD, residual_YD = last.mlp_sublayer(x_YD, residual_YD, ctx)
        return self.norm.forward(x_YD, residual_YD)[0]


class BaseLLMModel(BaseOP):
    """A decoder and its output head, on one rank.

    Args:
        max_seq_len: positions to make room for in the rotary tables.

    Attributes:
        layer_class: of each layer.
        bias_fields: the fields of config.json that give a layer biases, of those in `_BIASES`. A
            config may set no other, because weights of this architecture have no such biases.

    Raises:
        CheckpointError: the config sets another one.
    """

    layer_class: ClassVar[type[DecoderLayer]]
    bias_fields: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        config: ModelConfig,
        comm: DistributedCommunicator,
        max_seq_len: int,
        dtype: torch.dtype,
    ) -> None:
        self._check_biases(config)
        ropes = RotaryTables(max_seq_len, dtype)
        layers = [
            self.layer_class(layer, config, ropes, comm) for layer in range(config.num_layers)
        ]
        self.model = Decoder(config, layers, comm)
        tied = self.model.embed_tokens if config.tied_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.width, comm, tied)

    def forward(self, batch: Batch, ctx: Context) -> Tensor:
        """x_YD, the last hidden states of the tokens of `batch.returned`."""
        return self.model.forward(batch, ctx)

    def logits(self, x_BD: Tensor) -> Tensor:
        """logits_BV in the model's dtype, of the tokens that this rank has (`VocabShard`)."""
        return self.lm_head.forward(x_BD)

    def _check_biases(self, config: ModelConfig) -> None:
        for name in _BIASES:
            if getattr(config, name) and name not in self.bias_fields:
                raise CheckpointError(
                    f"config.json: {name} is true, but the layers of {config.architecture} "
                    "have no such biases"
                )
