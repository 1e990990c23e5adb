"""GGUF files: their metadata as a Hugging Face folder, their tensors under Hugging Face's names.

`unpack` writes config, tokenizer and chat template of a file into a folder once; the weights stay in the file, which
the folder links to, and are dequantized as they are read. Architectures: llama (and Mistral, which is written as
llama), qwen2, qwen3, qwen3moe. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from minisgl.errors import CheckpointError

GGUF_NAME = "model.gguf"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_CONFIG_FIELDS = {  # config.json's name: GGUF's, behind the architecture's prefix
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor lies: in which GGUF tensor, as which expert, in which order of rows."""

    tensor: gguf.ReaderTensor
    expert: int | None
    row_order: NDArray[np.int64] | None


class GGUFFile:
    """One open GGUF file, mapped into memory.

    Attributes:
        shapes: the shape of each tensor, by its Hugging Face name.

    Raises:
        CheckpointError: it is no GGUF file, or of an unknown architecture.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from None
        self.kind = str(self.field("general.architecture"))
        if self.kind not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise CheckpointError(f"{path} has the architecture {self.kind!r}; there is {known}")
        for name in ("attention.head_count", "embedding_length"):
            if not self.field(f"{self.kind}.{name}"):
                raise CheckpointError(f"{path}: the field {self.kind}.{name} is missing")
        self._sources = self._locate_all()
        self.shapes = {name: _shape(source) for name, source in self._sources.items()}
        if "model.embed_tokens.weight" not in self.shapes:
            raise CheckpointError(f"{path} has no tensor 'model.embed_tokens.weight' (token_embd)")

    def __str__(self) -> str:
        return str(self._path)

    def field(self, name: str) -> Any:
        """A metadata value, None if there is none."""
        entry = self._reader.get_field(name)
        return None if entry is None else entry.contents()

    def tensor(self, name: str, part: tuple[slice, ...]) -> NDArray[np.float32]:
        """Dequantize the rows of a part and cut its columns out; the other rows are not read."""
        source = self._sources[name]
        data = source.tensor.data if source.expert is None else source.tensor.data[source.expert]
        rows = part[0] if source.row_order is None else source.row_order[part[0]]
        values = gguf.dequantize(data[rows], source.tensor.tensor_type)
        return np.array(values[(slice(None), *part[1:])], dtype=np.float32)

    def config(self) -> dict[str, Any]:
        """What config.json would say."""
        given = {name: self.field(f"{self.kind}.{key}") for name, key in _CONFIG_FIELDS.items()}
        return {
            "architectures": [_ARCHITECTURES[self.kind]],
            **{name: value for name, value in given.items() if value is not None},
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "norm_topk_prob": True,
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self.shapes,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self.shapes,
            "eos_token_id": self._eos_ids(),
            "rope_parameters": self._rope_parameters(),
        }

    def _eos_ids(self) -> list[int]:
        ids = (self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return sorted({token for token in ids if token is not None})

    def _rope_parameters(self) -> dict[str, Any]:
        rope = f"{self.kind}.rope"
        given = {
            "rope_theta": self.field(f"{rope}.freq_base"),
            "rope_type": (self.field(f"{rope}.scaling.type") or "none").replace("none", "default"),
            "factor": self.field(f"{rope}.scaling.factor"),
            "original_max_position_embeddings": self.field(
                f"{rope}.scaling.original_context_length"
            ),
        }
        for tensor in self._reader.tensors:
            if tensor.name == "rope_freqs.weight":
                given |= {"rope_type": "divided", "divisors": tensor.data.tolist()}
        return {name: value for name, value in given.items() if value is not None}

    def _locate_all(self) -> dict[str, _Source]:
        try:
            return {
                name: source
                for tensor in self._reader.tensors
                for name, source in self._locate(tensor)
            }
        except (ValueError, TypeError, MemoryError) as error:
            raise CheckpointError(f"{self}: its metadata do not fit its tensors: {error}") from None

    def _locate(self, tensor: gguf.ReaderTensor) -> list[tuple[str, _Source]]:
        stem, _, kind = tensor.name.rpartition(".")
        if stem in _TENSORS:
            return [(f"{_TENSORS[stem]}.{kind}", _Source(tensor, None, None))]
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer is None or layer[2] not in _LAYER_TENSORS:
            return []
        name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{kind}"
        if "*" in name:
            return [
                (name.replace("*", str(e)), _Source(tensor, e, None))
                for e in range(len(tensor.data))
            ]
        return [(name, _Source(tensor, None, self._row_order(layer[2])))]

    def _row_order(self, tensor: str) -> NDArray[np.int64] | None:
        """Llama's q and k rows are stored with the two halves of each head interleaved; this undoes it."""
        keys = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        if self.kind != "llama" or tensor not in keys:
            return None
        num_heads = self.field(f"llama.{keys[tensor]}") or self.field("llama.attention.head_count")
        head_dim = self.field("llama.attention.key_length") or (
            self.field("llama.embedding_length") // self.field("llama.attention.head_count")
        )
        rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def _shape(source: _Source) -> tuple[int, ...]:
    whole = tuple(int(size) for size in reversed(source.tensor.shape))
    return whole if source.expert is None else whole[1:]


def unpack(path: Path, folder: Path) -> None:
    """Write a Hugging Face folder for a GGUF file: config, tokenizer, chat template, and a link to the file.

    Raises:
        CheckpointError: the file is damaged, or its architecture or tokenizer is unknown.
    """
    from transformers import AutoTokenizer

    file = GGUFFile(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the library raises whatever its converters do
        raise CheckpointError(f"the tokenizer of {path} cannot be converted: {error}") from error
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(file.config(), indent=2))
    if not (folder / GGUF_NAME).exists():
        (folder / GGUF_NAME).symlink_to(path.resolve())
