"""Small GGUF files of tiny models, written as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.checkpoints import BOS_ID, EOS_ID, SPECIAL_TOKENS, tiny_model, tiny_tokenizer

Array = NDArray[np.float32]
KINDS = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
_NAMES = [
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.", "blk."),
    (r"self_attn\.(q|k|v)_proj", r"attn_\1"),
    (r"self_attn\.(q|k)_norm", r"attn_\1_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"mlp\.gate\.", "ffn_gate_inp."),
    (r"mlp\.experts\.(gate|up|down)_proj", r"ffn_\1_exps"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
]


def gguf_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def permuted(weight: Array, num_heads: int) -> Array:
    """The rows of q and k of a Llama in the order of llama.cpp.

    It turns neighbours, transformers turns halves.
    """
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def saved_weights(folder: Path) -> dict[str, Array]:
    """The tensors of a folder of safetensors."""
    from safetensors.numpy import load_file

    return {
        name: weight
        for path in folder.glob("*.safetensors")
        for name, weight in load_file(path).items()
    }


def _stacked(weights: dict[str, Array]) -> dict[str, Array]:
    """The experts of a layer as one tensor; all else as it is."""
    stacks: dict[str, list[Array]] = {}
    for name in sorted(
        weights, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]
    ):
        stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(weights[name])
    return {
        name: np.stack(stack) if ".experts." in name else stack[0] for name, stack in stacks.items()
    }


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    weights: dict[str, Array],
    type_of: Callable[[str], Type] = lambda name: Type.F32,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
) -> Path:
    """Write a file.

    Args:
        type_of: from a GGUF tensor's name to its type; vectors are F32 always.
        fields: further metadata, without the architecture's prefix if it begins with a dot; None
            leaves a field out.
        tensors: further tensors.
    """
    config = model.config
    kind = KINDS[config.model_type]
    writer = gguf.GGUFWriter(path, kind)
    given = {**_fields(config), **tokenizer_fields(), **(fields or {})}
    named = {kind + name if name.startswith(".") else name: given[name] for name in given}
    for name, value in named.items():
        if value is not None:
            _add_field(writer, name, value)
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    for hf_name, weight in _stacked(weights).items():
        name = gguf_name(hf_name)
        count = next((heads[part] for part in heads if part in name), None)
        if kind == "llama" and count:
            weight = permuted(weight, count)
        _add_tensor(writer, name, weight, type_of(name))
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_fields(
    folder: Path, checkpoint: Callable[[str], Path], fields: dict[str, Any], **more: Any
) -> Path:
    """Write a file of the tiny Llama with further metadata."""
    return write_gguf(
        folder / "one.gguf",
        tiny_model("llama"),
        saved_weights(checkpoint("llama")),
        fields=fields,
        **more,
    )


def _fields(config: Any) -> dict[str, Any]:
    return {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.key_length": getattr(config, "head_dim", None),
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".rope.freq_base": config.rope_parameters["rope_theta"],
        ".expert_count": getattr(config, "num_experts", None),
        ".expert_used_count": getattr(config, "num_experts_per_tok", None),
        ".expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }


def tokenizer_fields() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL)
            for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in inner["merges"]],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


SENTENCES = ["▁", "a", "b", "▁a", "ab", "▁ab", "▁▁"]  # pieces of a sentencepiece vocabulary


def sentencepiece_tokens() -> list[str]:
    """Special tokens, all bytes, and `SENTENCES`, by their ids."""
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCES]


def sentencepiece_fields() -> dict[str, Any]:
    """A tokenizer of Llama 2's kind, in place of that of `tokenizer_fields`."""
    tokens = sentencepiece_tokens()
    special = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types = [*special, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * len(SENTENCES)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](name, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: Array, type_: Type) -> None:
    if weight.ndim == 1 or type_ == Type.F32:
        writer.add_tensor(name, np.ascontiguousarray(weight))
    else:
        writer.add_tensor(name, gguf.quants.quantize(weight, type_), raw_dtype=type_)
