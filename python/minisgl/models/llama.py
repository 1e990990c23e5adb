"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288), and models of their shape: SmolLM2.

Next to read: `blocks.py`.
"""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.layers import RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel
from minisgl.models.blocks import Attention, GatedMLP, PreNormLayer


class LlamaLayer(PreNormLayer):
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


class LlamaForCausalLM(BaseLLMModel):
    """A stack of Llama's layers."""

    layer_class = LlamaLayer
    bias_fields = ("attention_bias", "mlp_bias")
