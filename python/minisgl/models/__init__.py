"""Models: the networks that checkpoints describe, and their weights.

    base.py       what all share: embedding, stack of layers, last norm, output head
    blocks.py     attention and MLP, of which most layers are made
    llama.py mistral.py olmo2.py olmo3.py qwen2.py qwen3.py qwen3_moe.py smollm3.py
                  an architecture each: its decoder layer
    register.py   from an architecture's name to its class

    weight_sources.py     which source a folder's weights have; random weights
    checkpoint_files.py   what sources have in common that read files
    safetensors_files.py  safetensors files, of which a rank reads its shard
    gguf_file.py          a GGUF file
    quantized.py          safetensors whose weights are quantized

What a folder says besides weights is read by `minisgl.checkpoint`. Read `base.py`, then `blocks.py`
and `qwen3.py`.
"""

from minisgl.models.base import BaseLLMModel
from minisgl.models.register import get_model_class
from minisgl.models.weight_sources import load_weight, open_checkpoint

__all__ = [
    "BaseLLMModel",
    "get_model_class",
    "load_weight",
    "open_checkpoint",
]
