"""Llama 2 and 3, and what shares their shape, such as SmolLM2 (Touvron et al. 2023, arXiv:2307.09288)."""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel


class LlamaForCausalLM(BaseLLMModel):
    """The shared decoder as it is."""
