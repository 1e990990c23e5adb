"""Qwen3, mixture of experts (Qwen team 2025, arXiv:2505.09388)."""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import CheckpointError
from minisgl.layers import MoELayer, RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel
from minisgl.models.blocks import Attention, GatedMLP, PreNormLayer

_EXPERT_ACTIVATION = "silu"  # the one that the kernels of experts have


class Qwen3MoeLayer(PreNormLayer):
    """A layer of Qwen3 with experts for its MLP, except where the config says that it is dense.

    Raises:
        CheckpointError: experts have another activation than SiLU.
    """

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
        if layer in config.dense_layers:
            self.mlp = GatedMLP(config, comm)
        else:
            if config.activation != _EXPERT_ACTIVATION:
                raise CheckpointError(
                    f"config.json: hidden_act {config.activation!r} is not supported for experts; "
                    f"there is {_EXPERT_ACTIVATION}"
                )
            self.mlp = MoELayer(
                config.width,
                config.expert_width,
                config.num_experts,
                config.experts_per_token,
                comm,
                normalize=config.normalize_experts,
            )


class Qwen3MoeForCausalLM(BaseLLMModel):
    """A stack of Qwen3's layers, most of them with experts."""

    layer_class = Qwen3MoeLayer
    bias_fields = ("attention_bias",)
