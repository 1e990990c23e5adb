"""Models: the networks that checkpoints describe, and their weights.

    llama.py mistral.py olmo2.py olmo3.py qwen2.py qwen3.py qwen3_moe.py smollm3.py
                  an architecture each: its decoder layer
    blocks.py     attention and MLP, of which most layers are made
    base.py       what all share: embedding, stack of layers, last norm, output head
    register.py   from an architecture's name to its class
    weight.py     from a folder's weight files to this rank's tensors

What a folder says besides weights is read by `minisgl.checkpoint`. Read
`qwen3.py`, then `base.py` and `blocks.py`.
"""

from minisgl.checkpoint import ModelConfig, RotaryConfig, fetch_model
from minisgl.models.base import BaseLLMModel
from minisgl.models.register import get_model_class
from minisgl.models.weight import load_weight, open_checkpoint

__all__ = [
    "BaseLLMModel",
    "ModelConfig",
    "RotaryConfig",
    "fetch_model",
    "get_model_class",
    "load_weight",
    "open_checkpoint",
]
