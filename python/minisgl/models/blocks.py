"""Blocks from which the layers of several architectures are made."""

# Dimensions: D model width, H head width, M all heads of a token, T tokens of a step.

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator, PartialSum
from minisgl.errors import CheckpointError
from minisgl.kernel import gelu_and_mul, silu_and_mul
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    Context,
    LinearGated,
    LinearQKVMerged,
    LinearRowParallel,
    RMSNorm,
    RMSNormFused,
    RotaryTables,
)
from minisgl.models.base import Addend, DecoderLayer

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul}


class Attention(BaseOP):
    """Projections around an `AttentionLayer`.

    Args:
        head_norm: whether each head of queries and keys is normed before its rotation (RoPE).
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        ropes: RotaryTables,
        comm: DistributedCommunicator,
        *,
        qkv_bias: bool,
        output_bias: bool,
        head_norm: bool = False,
    ) -> None:
        rope = ropes.table(config.attention[layer].rope, config.head_dim)
        self.qkv_proj = qkv_projection(config, comm, bias=qkv_bias)
        self.o_proj = output_projection(config, comm, bias=output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if head_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if head_norm else None
        self.attention = AttentionLayer(layer, rope, self.q_norm, self.k_norm)

    def forward(self, x_TD: Tensor, batch: Batch, ctx: Context) -> PartialSum:
        qkv_TMH = self.qkv_proj.forward_heads(x_TD)
        return self.o_proj.forward(self.attention.forward(qkv_TMH, batch, ctx))


def qkv_projection(
    config: ModelConfig, comm: DistributedCommunicator, *, bias: bool
) -> LinearQKVMerged:
    """From activations to the heads of queries, keys and values."""
    return LinearQKVMerged(
        config.width, config.num_heads, config.num_kv_heads, config.head_dim, comm.info, bias=bias
    )


def output_projection(
    config: ModelConfig, comm: DistributedCommunicator, *, bias: bool
) -> LinearRowParallel:
    """From the outputs of attention back to the model's width."""
    return LinearRowParallel(config.num_heads * config.head_dim, config.width, comm, bias=bias)


class MLP(Protocol):
    """The MLP of a layer, dense or with experts."""

    def forward(self, x_TD: Tensor, ctx: Context) -> PartialSum: ...


class GatedMLP(BaseOP):
    """down(activation(gate(x)) * up(x)).

    Raises:
        CheckpointError: the activation is not known.
    """

    def __init__(self, config: ModelConfig, comm: DistributedCommunicator) -> None:
        if config.activation not in _ACTIVATIONS:
            raise CheckpointError(
                f"config.json: hidden_act {config.activation!r} is not supported; "
                f"there is {', '.join(_ACTIVATIONS)}"
            )
        activation = _ACTIVATIONS[config.activation]
        self.gate_up_proj = LinearGated(
            config.width, config.mlp_width, activation, comm.info, bias=config.mlp_bias
        )
        self.down_proj = LinearRowParallel(
            config.mlp_width, config.width, comm, bias=config.mlp_bias
        )

    def forward(self, x_TD: Tensor, ctx: Context) -> PartialSum:  # noqa: ARG002 - as of every MLP
        return self.down_proj.forward(self.gate_up_proj.forward_gated(x_TD))


class PreNormLayer(DecoderLayer):
    """Norm, attention, norm, MLP: a norm comes before each sublayer, as in Llama.

    A subclass creates the four attributes.
    """

    input_layernorm: RMSNormFused
    self_attn: Attention
    post_attention_layernorm: RMSNormFused
    mlp: MLP

    def attention_sublayer(
        self, x_TD: Addend, residual_TD: Tensor | None, batch: Batch, ctx: Context
    ) -> tuple[PartialSum, Tensor]:
        x_TD, residual_TD = self.input_layernorm.forward(x_TD, residual_TD)
        return self.self_attn.forward(x_TD, batch, ctx), residual_TD

    def mlp_sublayer(
        self, x_TD: Addend, residual_TD: Tensor | None, ctx: Context
    ) -> tuple[PartialSum, Tensor]:
        x_TD, residual_TD = self.post_attention_layernorm.forward(x_TD, residual_TD)
        return self.mlp.forward(x_TD, ctx), residual_TD
