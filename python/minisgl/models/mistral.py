"""Mistral 7B and its successors (Jiang et al. 2023, arXiv:2310.06825).

The first release attends to a sliding window. Within the window it is a Llama; `ModelConfig.sliding_window` makes
the engine limit the context to the window rather than compute something else behind it.
"""

from __future__ import annotations

from minisgl.models.base import BaseLLMModel


class MistralForCausalLM(BaseLLMModel):
    """The shared decoder as it is."""
