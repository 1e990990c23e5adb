"""From a model's name to a local folder, and from its JSON files to a config. Without torch.

    fetch.py           `fetch_model`: a folder, file or hub id to a folder in Hugging Face's layout
    default_model.py   the model that is served by default, SmolLM2-135M-Instruct
    gguf.py            GGUF files: their metadata and tensors
    gguf_folder.py     their metadata as such folders
    gguf_header.py     checks a GGUF file's header before its reader believes it
    pre_tokenizers.py  how the tokenizers of GGUF files split a text
    sentencepiece.py   how some of them spell the spaces of a text
    files.py           bounds of the small files of a folder
    auto_tokenizer.py  its tokenizer: tokenizer.json, or what transformers makes
    config.py          the folder's JSON files as a `ModelConfig`
    attention_spec.py  the part of it that says what the attention of each layer is
    quantization.py    how config.json says that the weights are quantized

Reading weights is `models/weight_sources.py`. Read `config.py`.
"""

from minisgl.checkpoint.attention_spec import AttentionSpec, RotaryConfig
from minisgl.checkpoint.config import (
    ModelConfig,
    foreign_eos_ids,
    recommendations_not_followed,
)
from minisgl.checkpoint.fetch import fetch_model, model_name
from minisgl.checkpoint.quantization import Quantization, StoredFormat

__all__ = [
    "AttentionSpec",
    "ModelConfig",
    "Quantization",
    "RotaryConfig",
    "StoredFormat",
    "fetch_model",
    "foreign_eos_ids",
    "model_name",
    "recommendations_not_followed",
]
