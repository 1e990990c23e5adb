"""Qwen3, mixture of experts (Qwen team 2025, arXiv:2505.09388)."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import CheckpointError
from minisgl.layers import Context, MoELayer, RMSNormFused, RotaryTables
from minisgl.models.base import BaseLLMModel, DecoderLayer
from minisgl.models.blocks import MLP, Attention, GatedMLP

_EXPERT_ACTIVATION = "silu"  # the one that the kernels of experts have


class Qwen3MoeLayer(DecoderLayer):
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
        self.mlp: MLP
        if layer in config.dense_layers:
            self.mlp = GatedMLP(config, comm)
        else:
            if config.activation != _EXPERT_ACTIVATION:
                raise CheckpointError(
                    f"hidden_act {config.activation!r} is not supported for experts: "
                    f"{_EXPERT_ACTIVATION}"
                )
            self.mlp = MoELayer(
                config.width,
                config.expert_width,
                config.num_experts,
                config.experts_per_token,
                comm,
                normalize=config.normalize_experts,
            )

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


class Qwen3MoeForCausalLM(BaseLLMModel):
    """A stack of Qwen3's layers, most of them with experts."""

    layer_class = Qwen3MoeLayer
