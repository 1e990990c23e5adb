"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388). Next to read: `layers/attention.py`."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator
from minisgl.layers import Context, RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel, DecoderLayer
from minisgl.models.blocks import Attention, GatedMLP


class Qwen3Layer(DecoderLayer):
    """Norm, attention, norm, MLP. Each head of queries and keys is normed before RoPE."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        ropes: RotaryTables,
        comm: DistributedCommunicator,
    ) -> None:
        self.input_layernorm = RMSNormFused(config.width, config.norm_eps)
        self.self_attn = Attention(
            layer,
            config,
            ropes,
            comm,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norm=True,
        )
        self.post_attention_layernorm = RMSNormFused(config.width, config.norm_eps)
        self.mlp = GatedMLP(config, comm)

    def attention_sublayer(
        self, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.input_layernorm.forward(x_TD, residual_TD)
        return self.self_attn.forward(x_TD, batch, ctx), residual_TD

    def mlp_sublayer(
        self, x_TD: Tensor, residual_TD: Tensor | None, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.post_attention_layernorm.forward(x_TD, residual_TD)
        return self.mlp.forward(x_TD, ctx), residual_TD


class Qwen3ForCausalLM(BaseLLMModel):
    """A stack of Qwen3's layers."""

    layer_class = Qwen3Layer
