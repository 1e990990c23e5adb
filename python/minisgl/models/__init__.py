"""Models: the networks that checkpoints describe, and their weights.

What architectures share:

    base.py      embedding, stack of layers, last norm, output head
    blocks.py    attention and MLP, from which most layers are made
    register.py  from an architecture's name to its class

One architecture per file, with its decoder layer:

    llama.py      Llama 2 and 3, SmolLM2
    mistral.py    Mistral 7B
    olmo2.py      OLMo 2
    olmo3.py      OLMo 3
    qwen2.py      Qwen2 and Qwen2.5
    qwen3.py      Qwen3
    qwen3_moe.py  Qwen3, mixture of experts
    smollm3.py    SmolLM3

Weights:

    weight_sources.py     chooses the source of a model's weights: files, or random numbers
    checkpoint_files.py   the common part of sources that read files
    safetensors_files.py  safetensors files, of which a rank reads its shard
    gguf_file.py          a GGUF file
    quantized.py          safetensors whose weights are quantized, dequantized as they are read

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
