"""The decoder that all architectures here share: attention and a gated MLP, each behind a norm, with residuals.

An architecture is a subclass that says what differs: `_attention_options` for biases and head norms, `_mlp` for
another kind of MLP. Weight names are the attributes' names. Next to read: `layers/attention.py`.
"""

# Dimension key: T tokens in the batch, B requests that sample, D model width, V vocab, F mlp width, M heads in all.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import CheckpointError
from minisgl.kernel import Rotation, gelu_and_mul, silu_and_mul
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    Context,
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearRowParallel,
    OPList,
    ParallelLMHead,
    RMSNorm,
    RMSNormFused,
    RotaryEmbedding,
    VocabParallelEmbedding,
    get_rope,
)

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul}


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Where the attention blocks of the architectures differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False


class AttentionBlock(BaseOP):
    """Projections around an `AttentionLayer`."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        options: AttentionOptions,
        comm: DistributedCommunicator,
    ) -> None:
        width, head_dim = config.width, config.head_dim
        self.qkv_proj = LinearQKVMerged(
            width, config.num_heads, config.num_kv_heads, head_dim, comm.info, bias=options.qkv_bias
        )
        self.o_proj = LinearRowParallel(
            config.num_heads * head_dim, width, comm, bias=options.output_bias
        )
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if options.head_norm else None
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if options.head_norm else None
        self.attention = AttentionLayer(layer, self.q_norm, self.k_norm)

    def forward(self, x_TD: Tensor, rotation: Rotation, batch: Batch, ctx: Context) -> Tensor:
        qkv_TMH = self.qkv_proj.forward_heads(x_TD)
        return self.o_proj.forward(self.attention.forward(qkv_TMH, rotation, batch, ctx))


class MLP(Protocol):
    """What follows the attention of a layer."""

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor: ...


class GatedMLP(BaseOP):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, comm: DistributedCommunicator) -> None:
        if config.activation not in _ACTIVATIONS:
            raise CheckpointError(
                f"activation {config.activation!r} is not supported: {', '.join(_ACTIVATIONS)}"
            )
        self._activation = _ACTIVATIONS[config.activation]
        parts = {"gate_proj": config.mlp_width, "up_proj": config.mlp_width}
        self.gate_up_proj = LinearColParallelMerged.even(
            config.width, parts, comm.info, bias=config.mlp_bias
        )
        self.down_proj = LinearRowParallel(
            config.mlp_width, config.width, comm, bias=config.mlp_bias
        )

    def forward(self, x_TD: Tensor, ctx: Context) -> Tensor:  # noqa: ARG002 - the signature of every MLP
        gate_TF, up_TF = self.gate_up_proj.forward(x_TD)
        return self.down_proj.forward(self._activation(gate_TF, up_TF))


class DecoderLayer(BaseOP):
    """One layer; the residual stream travels beside the activations, un-normalised."""

    def __init__(self, config: ModelConfig, attention: AttentionBlock, mlp: MLP) -> None:
        self.input_layernorm = RMSNormFused(config.width, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNormFused(config.width, config.norm_eps)
        self.mlp = mlp

    def attend(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotation: Rotation,
        batch: Batch,
        ctx: Context,
    ) -> tuple[Tensor, Tensor]:
        """The first half, in which tokens see each other."""
        x_TD, residual_TD = self.input_layernorm.forward(x_TD, residual_TD)
        return self.self_attn.forward(x_TD, rotation, batch, ctx), residual_TD

    def transform(self, x_TD: Tensor, residual_TD: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """The second half, in which each token is by itself."""
        x_TD, residual_TD = self.post_attention_layernorm.forward(x_TD, residual_TD)
        return self.mlp.forward(x_TD, ctx), residual_TD


class Decoder(BaseOP):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        rope: RotaryEmbedding,
        layers: list[DecoderLayer],
        comm: DistributedCommunicator,
    ) -> None:
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.width, comm)
        self.rotary = rope
        self.layers = OPList(layers)
        self.norm = RMSNormFused(config.width, config.norm_eps)

    def forward(self, batch: Batch, ctx: Context) -> Tensor:
        """x_BD, the normed last activations of the tokens from which a request samples."""
        x_TD = self.embed_tokens.forward(batch.input_ids_T)
        rotation = self.rotary.forward(batch.position_T)
        *layers, last = self.layers
        residual_TD: Tensor | None = None
        for layer in layers:
            x_TD, residual_TD = layer.transform(
                *layer.attend(x_TD, residual_TD, rotation, batch, ctx), ctx
            )
        x_TD, residual_TD = last.attend(x_TD, residual_TD, rotation, batch, ctx)
        if batch.last_B is not None:  # nobody looks at the other tokens any more
            x_TD, residual_TD = x_TD[batch.last_B], residual_TD[batch.last_B]
        return self.norm.forward(*last.transform(x_TD, residual_TD, ctx))[0]


class BaseLLMModel(BaseOP):
    """A decoder and its output head, on one rank.

    Args:
        max_seq_len: positions to make room for in the rotary table.
    """

    def __init__(
        self,
        config: ModelConfig,
        comm: DistributedCommunicator,
        max_seq_len: int,
        dtype: torch.dtype,
    ) -> None:
        rope = get_rope(config.rotary, max_seq_len, dtype)
        options = self._attention_options(config)
        layers = [
            DecoderLayer(
                config, AttentionBlock(i, config, options, comm), self._mlp(i, config, comm)
            )
            for i in range(config.num_layers)
        ]
        self.model = Decoder(config, rope, layers, comm)
        tied = self.model.embed_tokens if config.tied_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.width, comm, tied)

    def _attention_options(self, config: ModelConfig) -> AttentionOptions:
        return AttentionOptions(qkv_bias=config.attention_bias, output_bias=config.attention_bias)

    def _mlp(self, layer: int, config: ModelConfig, comm: DistributedCommunicator) -> MLP:  # noqa: ARG002
        return GatedMLP(config, comm)

    def forward(self, batch: Batch, ctx: Context) -> Tensor:
        """x_BD, the last hidden states of the tokens from which a request samples."""
        return self.model.forward(batch, ctx)

    def logits(self, x_BD: Tensor) -> Tensor | None:
        """logits_BV in the model's dtype on rank 0; None on the others."""
        return self.lm_head.forward(x_BD)
