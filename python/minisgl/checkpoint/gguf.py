"""GGUF files: their metadata, and their tensors under Hugging Face's names.

Tensors are dequantized as they are read. Architectures: llama (and Mistral, which is written as
llama), qwen2, qwen3, qwen3moe. Next to read: `gguf_folder.py`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from minisgl.checkpoint.gguf_header import check_gguf_header
from minisgl.checkpoint.gguf_types import fault_of_type
from minisgl.errors import CheckpointError
from minisgl.utils.excerpts import excerpt

_MAX_EXPERTS = 4096
_MAX_DIVISORS = 4096
_ROPE_DIVISORS = "rope_freqs.weight"  # read as a part of the config
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
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
        row_order: the index of each row in the file; None if they are in order.
    """

    tensor: gguf.ReaderTensor
    expert: int | None
    row_order: NDArray[np.int64] | None


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """Slices its fields out of a plain array. Slicing a memory map takes far longer."""

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, data: NDArray[np.uint8]) -> None:
        self._data = data.view(np.ndarray)


class GGUFFile:
    """One open GGUF file, mapped into memory.

    Attributes:
        architecture: its name in a config.json.
        shapes: the shape of each tensor, by its Hugging Face name.
        unknown_names: GGUF's names of tensors that no architecture here has.

    Raises:
        CheckpointError: the file is no GGUF file, its architecture is unknown, or a field that is
            read here has another type than it must.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        check_gguf_header(path)
        try:
            self._reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from None
        self._check_whole()
        self._arch = str(self.field("general.architecture"))
        if self._arch not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise CheckpointError(
                f"{path} has the architecture {excerpt(self._arch)}; there is {known}"
            )
        self.architecture = _ARCHITECTURES[self._arch]
        for name in ("attention.head_count", "embedding_length"):
            if not self.model_field(name):
                raise CheckpointError(f"{path}: the field {self.key(name)} is missing or 0")
        self.unknown_names: list[str] = []
        self._stored = self._find_tensors()
        self.shapes = {name: _shape(stored) for name, stored in self._stored.items()}
        if "model.embed_tokens.weight" not in self.shapes:
            raise CheckpointError(f"{path} has no tensor 'model.embed_tokens.weight' (token_embd)")

    def __str__(self) -> str:
        return str(self._path)

    def _check_whole(self) -> None:
        num_parts = self.field("split.count")
        if num_parts not in (None, 0, 1):
            raise CheckpointError(
                f"{self} is one of {num_parts} parts of a model (split.count), which are not read; "
                "join them with llama.cpp's llama-gguf-split --merge"
            )

    def field(self, name: str) -> Any:
        """Return a metadata value, or None if there is none.

        Raises:
            CheckpointError: it has another type than it must, or cannot be read.
        """
        self.check_type(name)
        entry = self._reader.get_field(name)
        try:
            return None if entry is None else entry.contents()
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self}: the field {name} cannot be read: {error}") from None

    def check_type(self, name: str) -> None:
        """
        Raises:
            CheckpointError: the field is there, and has another type than it must.
        """
        entry = self._reader.get_field(name)
        fault = None if entry is None else fault_of_type(name, entry.types)
        if fault is not None:
            raise CheckpointError(f"{self}: {fault}")

    def key(self, name: str) -> str:
        """The name in the file of a field of the model."""
        return f"{self._arch}.{name}"

    def model_field(self, name: str) -> Any:
        """Return a metadata value whose name begins with the architecture's, or None."""
        return self.field(self.key(name))

    def rope_divisors(self) -> list[float] | None:
        """Return the divisor of each frequency of the rotation; None if there is no such list.

        Raises:
            ValueError: there are more divisors than a head has frequencies.
        """
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_DIVISORS:
                if tensor.data.size > _MAX_DIVISORS:
                    raise ValueError(f"{tensor.name} has {tensor.data.size} numbers")
                divisors: list[float] = tensor.data.tolist()
                return divisors
        return None

    @property
    def head_dim(self) -> int:
        """The width of a head, if the metadata make sense."""
        width: int | None = self.model_field("attention.key_length")
        return width or (
            self.model_field("embedding_length") // self.model_field("attention.head_count")
        )

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
        is_vector = len(self.shapes[name]) == 1  # whose blocks hold several of its rows
        try:
            values = gguf.dequantize(data if is_vector else data[rows], stored.tensor.tensor_type)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self}: {name!r} cannot be dequantized: {error}") from None
        values = values[rows] if is_vector else values[(slice(None), *part[1:])]
        return np.array(values, dtype=np.float32)

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
        """Hugging Face's names for a GGUF tensor's content: none, one, or one per expert."""
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
        num_heads: int = self.model_field(keys[kind]) or self.model_field("attention.head_count")
        head_dim = self.head_dim
        num_rows = int(tensor.shape[-1])
        if num_heads * head_dim != num_rows or head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"{tensor.name!r} has {num_rows} rows for {num_heads} heads of {head_dim} "
                f"({self.key(keys[kind])})"
            )
        rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)


def _shape(stored: _StoredTensor) -> tuple[int, ...]:
    shape = tuple(int(size) for size in reversed(stored.tensor.shape))
    return shape if stored.expert is None else shape[1:]
