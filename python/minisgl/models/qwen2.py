"""Qwen2 and Qwen2.5 (Qwen team 2024, arXiv:2407.10671)."""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.models.base import AttentionOptions, BaseLLMModel


class Qwen2ForCausalLM(BaseLLMModel):
    """Queries, keys and values have a bias, the output has none."""

    def _attention_options(self, config: ModelConfig) -> AttentionOptions:  # noqa: ARG002
        return AttentionOptions(qkv_bias=True)
