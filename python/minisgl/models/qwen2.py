"""Qwen2 and Qwen2.5 (Qwen team 2024, arXiv:2407.10671)."""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.layers import RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel
from minisgl.models.blocks import Attention, GatedMLP, PreNormLayer


class Qwen2Layer(PreNormLayer):
    """Norm, attention, norm, MLP. Queries, keys and values have a bias, the output has none."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        ropes: RotaryTables,
        comm: DistributedCommunicator,
    ) -> None:
        self.input_layernorm = RMSNormFused(config.width, config.norm_eps)
        self.self_attn = Attention(layer, config, ropes, comm, qkv_bias=True, output_bias=False)
        self.post_attention_layernorm = RMSNormFused(config.width, config.norm_eps)
        self.mlp = GatedMLP(config, comm)


class Qwen2ForCausalLM(BaseLLMModel):
    """A stack of Qwen2's layers. In some checkpoints the last ones have a sliding window."""

    layer_class = Qwen2Layer
    bias_fields = ("attention_bias",)  # it is true anyway, of queries, keys and values
