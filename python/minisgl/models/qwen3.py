"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388). Next to read: `engine/sampling_batch.py`."""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.layers import RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel
from minisgl.models.blocks import Attention, GatedMLP, PreNormLayer


class Qwen3Layer(PreNormLayer):
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


class Qwen3ForCausalLM(BaseLLMModel):
    """A stack of Qwen3's layers."""

    layer_class = Qwen3Layer
    bias_fields = ("attention_bias",)
