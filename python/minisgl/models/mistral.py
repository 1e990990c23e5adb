"""Mistral 7B and its successors (Jiang et al. 2023, arXiv:2310.06825)."""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel
from minisgl.models.llama import LlamaLayer


class MistralForCausalLM(BaseLLMModel):
    """A stack of Llama's layers. Those of the first release attend to a sliding window.

    The window stands in the layers' `AttentionSpec`, which the attention backend has.
    """

    layer_class = LlamaLayer
    bias_fields = ()
