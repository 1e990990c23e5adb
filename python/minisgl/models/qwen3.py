"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388). Next to read: `base.py`."""

from __future__ import annotations

from minisgl.checkpoint import ModelConfig
from minisgl.models.base import AttentionOptions, BaseLLMModel


class Qwen3ForCausalLM(BaseLLMModel):
    """Each head of queries and keys is normed before it is turned."""

    def _attention_options(self, config: ModelConfig) -> AttentionOptions:
        bias = config.attention_bias
        return AttentionOptions(qkv_bias=bias, output_bias=bias, head_norm=True)
