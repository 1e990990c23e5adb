"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288), and models of their shape: SmolLM2.

Next to read: `blocks.py`.
"""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator
from minisgl.layers import Context, RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel, DecoderLayer
from minisgl.models.blocks import Attention, GatedMLP


class LlamaLayer(DecoderLayer):
    """Norm, attention, norm, MLP. The config says which of them have biases."""

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


class LlamaForCausalLM(BaseLLMModel):
    """A stack of Llama's layers."""

    layer_class = LlamaLayer
