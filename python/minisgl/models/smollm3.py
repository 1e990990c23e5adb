"""SmolLM3 (Hugging Face 2025, https://huggingface.co/blog/smollm3)."""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel
from minisgl.models.llama import LlamaLayer


class SmolLM3ForCausalLM(BaseLLMModel):
    """A stack of Llama's layers. Every fourth has no rotary embedding ("NoPE").

    The layers' `AttentionSpec` says which those are. After Yang et al. 2025, arXiv:2501.18795.
    """

    layer_class = LlamaLayer
    bias_fields = ("attention_bias", "mlp_bias")
