"""Qwen3, mixture of experts (Qwen team 2025, arXiv:2505.09388)."""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.layers import MoELayer
from minisgl.models.base import MLP, GatedMLP
from minisgl.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Experts in place of the MLP, but in the layers that the config exempts."""

    def _mlp(self, layer: int, config: ModelConfig, comm: DistributedCommunicator) -> MLP:
        if layer in config.dense_layers:
            return GatedMLP(config, comm)
        return MoELayer(
            config.width,
            config.expert_width,
            config.num_experts,
            config.experts_per_token,
            comm,
            normalize=config.normalize_experts,
        )
