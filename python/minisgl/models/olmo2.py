"""OLMo 2 (OLMo team 2024, arXiv:2501.00656)."""

# Dimensions: D model width, H head width, M all heads of a token, T tokens of a step,
# X a selection out of another dimension.

from __future__ import annotations

from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.core import Batch
from minisgl.distributed import DistributedCommunicator, PartialSum, whole
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    Context,
    FullWidthQKNorm,
    RMSNorm,
    RotaryTables,
    take_queries,
)
from minisgl.models.base import Addend, BaseLLMModel, DecoderLayer
from minisgl.models.blocks import GatedMLP, output_projection, qkv_projection


class Olmo2Attention(BaseOP):
    """Attention with one norm over all query heads together, and one over all key heads."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        ropes: RotaryTables,
        comm: DistributedCommunicator,
    ) -> None:
        rope = ropes.table(config.attention[layer].rope, config.head_dim)
        self.qkv_proj = qkv_projection(config, comm, bias=config.attention_bias)
        self.qk_norm = FullWidthQKNorm(
            config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, comm
        )
        self.attention = AttentionLayer(layer, rope)
        self.o_proj = output_projection(config, comm, bias=config.attention_bias)

    def forward(self, x_TD: Tensor, batch: Batch, ctx: Context) -> PartialSum:
        qkv_TMH = self.qkv_proj.forward_heads(x_TD)
        self.qk_norm.apply(qkv_TMH)
        return self.o_proj.forward(self.attention.forward(qkv_TMH, batch, ctx))


class Olmo2Layer(DecoderLayer):
    """Attention, norm, MLP, norm: a norm comes after each sublayer, not before.

    No norm of a layer reads the residual stream, so x is the whole stream, a tensor on each rank,
    and residual stays None.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        ropes: RotaryTables,
        comm: DistributedCommunicator,
    ) -> None:
        self.self_attn = Olmo2Attention(layer, config, ropes, comm)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config, comm)
        self.post_feedforward_layernorm = RMSNorm(config.width, config.norm_eps)

    def attention_sublayer(
        self, x_TD: Addend, residual_TD: Tensor | None, batch: Batch, ctx: Context
    ) -> tuple[Tensor, None]:
        assert residual_TD is None
        x_TD = whole(x_TD)
        attended_XD = self.self_attn.forward(x_TD, batch, ctx)
        x_XD = take_queries(x_TD, batch.queries)  # it is the whole stream
        return x_XD + self.post_attention_layernorm.forward(attended_XD), None

    def mlp_sublayer(
        self, x_TD: Addend, residual_TD: Tensor | None, ctx: Context
    ) -> tuple[Tensor, None]:
        assert residual_TD is None
        x_TD = whole(x_TD)
        mlp_TD = self.mlp.forward(x_TD, ctx)
        return x_TD + self.post_feedforward_layernorm.forward(mlp_TD), None


class Olmo2ForCausalLM(BaseLLMModel):
    """A stack of OLMo 2's layers."""

    layer_class = Olmo2Layer
    bias_fields = ("attention_bias",)
