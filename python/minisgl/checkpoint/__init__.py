"""From a model's name to a local folder, and from its JSON files to a config. Without torch.

    fetch.py           `fetch_model`: a folder, file or hub id to a folder in Hugging Face's layout
    default_model.py   the default model, SmolLM2-135M-Instruct
    gguf.py            GGUF files: their metadata and tensors
    gguf_folder.py     writes such a folder from their metadata
    gguf_header.py     checks a GGUF file's header before it is read
    gguf_types.py      the types that its metadata must have
    gguf_tokenizer.py  the tokenizer of a GGUF file, as a fast one
    pre_tokenizers.py  how the tokenizers of GGUF files split a text
    sentencepiece.py   how sentencepiece tokenizers spell the spaces of a text
    files.py           size limits of the small files of a folder
    auto_tokenizer.py  the folder's tokenizer: tokenizer.json, or one that transformers makes
    config.py          the folder's JSON files as a `ModelConfig`
    attention_spec.py  the attention of each layer, as a part of that config
    quantization.py    how config.json describes quantized weights

Reading weights is `models/weight_sources.py`. Read `config.py`.
"""

from minisgl.checkpoint.attention_spec import DIVIDED, ROPE_TYPES, AttentionSpec, RotaryConfig
from minisgl.checkpoint.config import (
    ModelConfig,
    foreign_eos_ids,
    recommendations_not_followed,
)
from minisgl.checkpoint.fetch import fetch_model, model_name
from minisgl.checkpoint.quantization import Quantization, StoredFormat

__all__ = [
    "DIVIDED",
    "ROPE_TYPES",
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
