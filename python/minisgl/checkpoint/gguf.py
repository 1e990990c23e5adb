"""GGUF files: their metadata as a Hugging Face folder, their tensors under Hugging Face's names.

`write_hf_folder` writes config, tokenizer and chat template of a file into a folder once. The
weights stay in the file, to which the folder has a link, and are dequantized as they are read.
Architectures: llama (and Mistral, which is written as llama), qwen2, qwen3, qwen3moe.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
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

from minisgl.checkpoint.files import GGUF_NAME, is_panic
from minisgl.checkpoint.gguf_header import check_gguf_header
from minisgl.checkpoint.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from minisgl.checkpoint.sentencepiece import spell_spaces
from minisgl.errors import CheckpointError

_MAX_EXPERTS = 4096
_MAX_DIVISORS = 4096
_ROPE_DIVISORS = "rope_freqs.weight"  # read as a part of the config
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
class _StoredTensor:
    """Where a Hugging Face tensor is stored in a GGUF file.

    Attributes:
        tensor: the GGUF tensor, which may stack the tensors of all experts.
        expert: which expert of the stack; None if there is no stack.
        row_order: the place of each row in the file; None if they are in order.
    """

    tensor: gguf.ReaderTensor
    expert: int | None
    row_order: NDArray[np.int64] | None


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """Cuts its fields out of a plain array. A slice of a memory map takes far longer."""

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, data: NDArray[np.uint8]) -> None:
        self._data = data.view(np.ndarray)


class GGUFFile:
    """One open GGUF file, mapped into memory.

    Attributes:
        shapes: the shape of each tensor, by its Hugging Face name.
        unknown_names: GGUF's names of tensors that no architecture here has.

    Raises:
        CheckpointError: the file is no GGUF file, or its architecture is unknown.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        check_gguf_header(path)
        try:
            self._reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from None
        self._arch = str(self.field("general.architecture"))
        if self._arch not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise CheckpointError(f"{path} has the architecture {self._arch!r}; there is {known}")
        for name in ("attention.head_count", "embedding_length"):
            if not self.field(f"{self._arch}.{name}"):
                raise CheckpointError(f"{path}: the field {self._arch}.{name} is missing")
        self.unknown_names: list[str] = []
        self._stored = self._find_tensors()
        self.shapes = {name: _shape(stored) for name, stored in self._stored.items()}
        if "model.embed_tokens.weight" not in self.shapes:
            raise CheckpointError(f"{path} has no tensor 'model.embed_tokens.weight' (token_embd)")

    def __str__(self) -> str:
        return str(self._path)

    def field(self, name: str) -> Any:
        """Return a metadata value, or None if there is none."""
        entry = self._reader.get_field(name)
        try:
            return None if entry is None else entry.contents()
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self}: the field {name} cannot be read: {error}") from None

    def tensor(self, name: str, part: tuple[slice, ...]) -> NDArray[np.float32]:
        """Return a part of a tensor, dequantized to float32. Other rows are not read.

        Args:
            part: a slice of each dimension.
        """
        stored = self._stored[name]
        data: Any = stored.tensor.data
        if stored.expert is not None:
            data = data[stored.expert]
        rows: Any = part[0]
        if stored.row_order is not None:
            rows = stored.row_order[rows]
        try:
            values = gguf.dequantize(data[rows], stored.tensor.tensor_type)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self}: {name!r} cannot be dequantized: {error}") from None
        return np.array(values[(slice(None), *part[1:])], dtype=np.float32)

    def config(self) -> dict[str, Any]:
        """Return the metadata as the content of a config.json.

        Raises:
            CheckpointError: a field has another type than it should.
        """
        try:
            return self._config()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self}: its metadata make no config: {error}") from None

    def pre_tokenizer(self) -> PreTokenizer | None:
        """Return how texts are split before merges apply; None if it is no byte-level BPE.

        Raises:
            CheckpointError: the file does not name the split, or its name is not known.
        """
        if self.field("tokenizer.ggml.model") != "gpt2":
            return None
        name = self.field("tokenizer.ggml.pre")
        pre_tokenizer = PRE_TOKENIZERS.get(str(name))
        if pre_tokenizer is None:
            raise CheckpointError(
                f"{self} has the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known: "
                "its texts would be split into wrong tokens. Convert the model again with a recent "
                "llama.cpp, or serve the folder of safetensors that the file was made from. Known "
                f"are {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        return pre_tokenizer

    def _config(self) -> dict[str, Any]:
        fields = {name: self.field(f"{self._arch}.{key}") for name, key in _CONFIG_FIELDS.items()}
        architecture = _ARCHITECTURES[self._arch]
        if self._arch == "llama" and fields["sliding_window"] is not None:
            architecture = "MistralForCausalLM"  # the same tensors, but all layers have the window
        return {
            "architectures": [architecture],
            **{name: value for name, value in fields.items() if value is not None},
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
        rope = f"{self._arch}.rope"
        scaling = self.field(f"{rope}.scaling.type") or "none"
        fields = {
            "rope_theta": self.field(f"{rope}.freq_base"),
            "rope_type": "default" if scaling == "none" else scaling,
            "factor": self.field(f"{rope}.scaling.factor"),
            "original_max_position_embeddings": self.field(
                f"{rope}.scaling.original_context_length"
            ),
        }
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_DIVISORS:
                if tensor.data.size > _MAX_DIVISORS:
                    raise ValueError(f"{tensor.name} has {tensor.data.size} numbers")
                fields |= {"rope_type": "divided", "divisors": tensor.data.tolist()}
        return {name: value for name, value in fields.items() if value is not None}

    def _find_tensors(self) -> dict[str, _StoredTensor]:
        stored: dict[str, _StoredTensor] = {}
        try:
            for tensor in self._reader.tensors:
                named = self._names_of(tensor)
                stored.update(named)
                if not named and tensor.name != _ROPE_DIVISORS:
                    self.unknown_names.append(tensor.name)
        except (ValueError, TypeError, MemoryError) as error:
            raise CheckpointError(f"{self}: its metadata do not fit its tensors: {error}") from None
        return stored

    def _names_of(self, tensor: gguf.ReaderTensor) -> list[tuple[str, _StoredTensor]]:
        """Hugging Face's names of what a GGUF tensor stores: none, one, or one an expert."""
        stem, _, kind = tensor.name.rpartition(".")
        if stem in _TENSORS:
            return [(f"{_TENSORS[stem]}.{kind}", _StoredTensor(tensor, None, None))]
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer is None or layer[2] not in _LAYER_TENSORS:
            return []
        name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{kind}"
        if "*" in name:
            if len(tensor.data) > _MAX_EXPERTS:
                raise ValueError(f"{tensor.name!r} has {len(tensor.data)} experts")
            return [
                (name.replace("*", str(expert)), _StoredTensor(tensor, expert, None))
                for expert in range(len(tensor.data))
            ]
        return [(name, _StoredTensor(tensor, None, self._row_order(layer[2], tensor)))]

    def _row_order(self, kind: str, tensor: gguf.ReaderTensor) -> NDArray[np.int64] | None:
        """Undo the order of llama's q and k rows, which interleaves the two halves of each head."""
        keys = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        if self._arch != "llama" or kind not in keys:
            return None
        num_heads = self.field(f"llama.{keys[kind]}") or self.field("llama.attention.head_count")
        head_dim = self.field("llama.attention.key_length") or (
            self.field("llama.embedding_length") // self.field("llama.attention.head_count")
        )
        num_rows = int(tensor.shape[-1])
        are_counts = type(num_heads) is int and type(head_dim) is int
        if not are_counts or num_heads * head_dim != num_rows:
            raise ValueError(
                f"{tensor.name!r} has {num_rows} rows for {num_heads!r} heads of {head_dim!r}"
            )
        rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def _shape(stored: _StoredTensor) -> tuple[int, ...]:
    shape = tuple(int(size) for size in reversed(stored.tensor.shape))
    return shape if stored.expert is None else shape[1:]


def write_hf_folder(path: Path, folder: Path) -> None:
    """Write config, tokenizer and chat template of a GGUF file, and a link to it, into a folder.

    Nothing beside the file is read: transformers gets the folder, where only the link is.

    Args:
        folder: is created if it is missing; else it may hold the file itself under `GGUF_NAME`,
            and nothing else.

    Raises:
        CheckpointError: the file is damaged, or its architecture or tokenizer is unknown.
        OSError: the folder cannot be written.
    """
    file = GGUFFile(path)
    pre_tokenizer = file.pre_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / GGUF_NAME).exists():
        (folder / GGUF_NAME).symlink_to(path.resolve())
    tokenizer = _convert_tokenizer(path, folder)
    # transformers knows the splits of a few names and takes GPT-2's for all others.
    if pre_tokenizer is not None:
        pre_tokenizer.apply_to(tokenizer.backend_tokenizer)
        if pre_tokenizer.adds_bos and file.field("tokenizer.ggml.add_bos_token") is None:
            tokenizer.add_bos_token = True
    if file.field("tokenizer.ggml.model") == "llama":
        adds_prefix = file.field("tokenizer.ggml.add_space_prefix") is not False
        spell_spaces(tokenizer.backend_tokenizer, adds_prefix=adds_prefix)
    _save(tokenizer, folder)
    _set_tokenizer_class(folder / "tokenizer_config.json")
    (folder / "config.json").write_text(json.dumps(file.config(), indent=2))


def _convert_tokenizer(path: Path, folder: Path) -> Any:
    """Return transformers' tokenizer of a GGUF file, which a folder has under `GGUF_NAME`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME, trust_remote_code=False)
    except BaseException as error:  # the library raises whatever its converters do
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise CheckpointError(f"the tokenizer of {path} cannot be converted: {error}") from error


def _save(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is Exception:  # how the library says that a file cannot be written
            raise OSError(str(error)) from error
        raise


def _set_tokenizer_class(path: Path) -> None:
    """Name the class that takes tokenizer.json as it is.

    Others, such as Qwen2's, replace the split that is written there by their own.
    """
    config = json.loads(path.read_text("utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
