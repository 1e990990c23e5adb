"""OLMo 3 (OLMo team 2025, arXiv:2512.13961)."""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel
from minisgl.models.olmo2 import Olmo2Layer


class Olmo3ForCausalLM(BaseLLMModel):
    """A stack of OLMo 2's layers. Three of four attend to a sliding window.

    The rotation (RoPE) of the fourth is stretched for long contexts, that of the others is not. The
    layers' `AttentionSpec` has both.
    """

    layer_class = Olmo2Layer
    bias_fields = ("attention_bias",)
