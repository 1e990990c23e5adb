"""Models: what a checkpoint folder says, and the network it describes.

    fetch.py, default_model.py, gguf.py   from a name to a local folder in Hugging Face's layout
    config.py                             from the folder's JSON files to a `ModelConfig`
    base.py                               the decoder that all architectures share
    llama.py mistral.py qwen2.py qwen3.py qwen3_moe.py   only what differs
    register.py                           from an architecture's name to its class
    weight.py                             from the folder's weight files to this rank's tensors

Read `qwen3.py`, then `base.py`.
"""

from minisgl.layers import RotaryConfig
from minisgl.models.base import BaseLLMModel
from minisgl.models.config import ModelConfig
from minisgl.models.fetch import fetch_model
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
