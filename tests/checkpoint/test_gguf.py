"""GGUF files under Hugging Face's names: tensors, whole and in parts, and files that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from minisgl.checkpoint import ModelConfig
from minisgl.checkpoint.gguf import GGUFFile
from minisgl.checkpoint.gguf_folder import hf_config
from minisgl.errors import CheckpointError
from minisgl.models import BaseLLMModel, get_model_class
from minisgl.models.gguf_file import GGUFCheckpoint
from tests.checkpoint.gguf_files import Array, permuted, saved_weights, with_fields, write_gguf
from tests.checkpoints import (
    IN_GGUF,
    VOCAB_SIZE,
    tiny_checkpoint,
    tiny_model,
)
from tests.distributed.groups import Alone

CPU = torch.device("cpu")
TYPES = [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_1]
Checkpoints = Callable[[str], Path]


def source_of(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(path, torch.float32, CPU)


def read(source: GGUFCheckpoint, name: str, like: Array, **parts: range) -> Tensor:
    return source.read(name, like.shape, **parts)


def rounded(weight: Array, name: str, type_: Type, num_heads: int | None) -> Array:
    """What is left of a weight after quantization in the order in which it is stored."""
    if weight.ndim == 1 or type_ == Type.F32:
        return weight
    stored = permuted(weight, num_heads) if num_heads else weight
    back = gguf.dequantize(gguf.quants.quantize(stored, type_), type_)
    if not num_heads:
        return back
    halves = back.reshape(
        num_heads, -1, 2, weight.shape[1]
    )  # transformers' order: undo llama.cpp's
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("arch", IN_GGUF)
def test_float32_tensors_are_exactly_those_of_the_checkpoint(
    arch: str, checkpoint: Checkpoints, written: Callable[..., Path]
) -> None:
    source = source_of(written(arch))
    for name, weight in saved_weights(checkpoint(arch)).items():
        assert torch.equal(read(source, name, weight), torch.from_numpy(weight)), name


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_quantized_tensors_are_what_gguf_dequantizes(
    arch: str, type_: Type, checkpoint: Checkpoints, written: Callable[..., Path]
) -> None:
    source = source_of(written(arch, type_))
    for name, weight in saved_weights(checkpoint(arch)).items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]) if arch == "llama" else None
        expected = torch.from_numpy(rounded(weight, name, type_, heads))
        assert torch.equal(read(source, name, weight), expected), name


@pytest.mark.parametrize("type_", [Type.F32, Type.Q8_0], ids=lambda type_: type_.name)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_parts_equal_slices_of_the_whole(
    arch: str, type_: Type, checkpoint: Checkpoints, written: Callable[..., Path]
) -> None:
    source = source_of(written(arch, type_))
    for name, weight in saved_weights(checkpoint(arch)).items():
        whole = read(source, name, weight)
        rows = range(weight.shape[0] // 4, weight.shape[0] // 2)
        assert torch.equal(read(source, name, weight, rows=rows), whole[rows.start : rows.stop]), (
            name
        )
        if weight.ndim == 2:
            cols = range(8, weight.shape[1] - 5)  # within blocks of 32
            assert torch.equal(
                read(source, name, weight, cols=cols), whole[:, cols.start : cols.stop]
            ), name
            both = read(source, name, weight, rows=rows, cols=cols)
            assert torch.equal(both, whole[rows.start : rows.stop, cols.start : cols.stop]), name


@pytest.mark.parametrize("type_", [Type.F16, Type.BF16, Type.Q8_0], ids=lambda type_: type_.name)
def test_vectors_of_any_type_are_read_whole_and_in_parts(type_: Type, tmp_path: Path) -> None:
    """llama.cpp writes them in float32, but a file need not. Those of q are in another order."""
    bias = np.arange(64, dtype=np.float32)
    q_and_v = {"q": permuted(bias, 4), "v": bias}
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.zeros((2, 64), np.float32))
    for kind, stored in q_and_v.items():
        numbers = gguf.quants.quantize(stored, type_)
        writer.add_tensor(f"blk.0.attn_{kind}.bias", numbers, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = source_of(tmp_path / "one.gguf")
    for kind in q_and_v:
        name = f"model.layers.0.self_attn.{kind}_proj.bias"
        whole = read(source, name, bias)
        assert torch.allclose(whole, torch.from_numpy(bias), atol=0.3), "but for rounding"
        for rows in (range(16, 32), range(7, 50)):
            part = read(source, name, bias, rows=rows)
            assert torch.equal(part, whole[rows.start : rows.stop])


def test_a_memory_map_is_made_of_the_file_and_not_of_each_token(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary is 100,000 slices, and of a memory map each takes far longer."""
    maps = []
    monkeypatch.setattr(np.memmap, "__array_finalize__", lambda self, _: maps.append(self))
    source_of(written("llama"))
    assert 1 <= len(maps) < 10


def test_what_is_read_has_the_dtype_asked_for_and_memory_of_its_own(
    written: Callable[..., Path],
) -> None:
    source = GGUFCheckpoint(written("llama"), torch.bfloat16, CPU)
    one, other = (source.read("model.norm.weight", (64,)) for _ in range(2))
    assert one.dtype == torch.bfloat16
    one.zero_()
    assert other.abs().sum() > 0


def model_of(folder: Path, comm: Alone) -> BaseLLMModel:
    config = ModelConfig.from_folder(folder)
    return get_model_class(config.architecture)(config, comm, 64, torch.float32)


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_a_rank_dequantizes_the_rows_of_its_part_only(
    arch: str,
    checkpoint: Checkpoints,
    written: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    dequantize = gguf.dequantize

    def counting(data: Any, type_: Type) -> Any:
        rows.append(len(data))
        return dequantize(data, type_)

    monkeypatch.setattr(gguf, "dequantize", counting)

    def rows_of(rank: int, size: int) -> int:
        rows.clear()
        model_of(checkpoint(arch), Alone(rank, size)).load(source_of(written(arch, Type.Q8_0)))
        return sum(rows)

    weights = saved_weights(checkpoint(arch)).items()
    whole = sum(len(weight) for _, weight in weights)
    by_columns = (
        "o_proj",
        "down_proj",
        "norm",
        "layernorm",
        "mlp.gate.",
    )  # of these each rank needs every row
    shared = sum(
        len(weight) for name, weight in weights if any(part in name for part in by_columns)
    )
    assert rows_of(0, 1) == whole
    of_tokens = [name for name, _ in weights if name.split(".")[-2] in ("embed_tokens", "lm_head")]
    divided = whole - shared - len(of_tokens) * VOCAB_SIZE
    for rank, num_tokens in enumerate((256, 45)):  # of 301, in segments of 256
        assert rows_of(rank, 2) == shared + divided / 2 + len(of_tokens) * num_tokens


def test_biases_of_a_llama_are_used(tmp_path: Path) -> None:
    """The file says so only by having the tensors."""
    biases = {"attention_bias": True}
    weights = saved_weights(tiny_checkpoint("llama", tmp_path / "hf", **biases))
    path = write_gguf(tmp_path / "one.gguf", tiny_model("llama", **biases), weights)
    for name, weight in weights.items():
        assert torch.equal(read(source_of(path), name, weight), torch.from_numpy(weight)), name
    assert hf_config(GGUFFile(path))["attention_bias"]


def test_a_missing_tensor_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    weights = saved_weights(checkpoint("llama"))
    del weights["model.layers.1.mlp.up_proj.weight"]
    source = source_of(write_gguf(tmp_path / "one.gguf", tiny_model("llama"), weights))
    with pytest.raises(
        CheckpointError, match=r"one\.gguf has no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"
    ):
        model_of(checkpoint("llama"), Alone(0, 1)).load(source)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(written: Callable[..., Path]) -> None:
    with pytest.raises(
        CheckpointError, match=rf"'lm_head\.weight' has the shape \({VOCAB_SIZE}, 64\), .*\(7, 64\)"
    ):
        source_of(written("llama")).read("lm_head.weight", (7, 64))


def test_an_unknown_architecture_is_named_with_those_there_are(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"one\.gguf has the architecture 'mamba'; there is .*llama.*qwen3moe"
    ):
        GGUFFile(tmp_path / "one.gguf")


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_of_a_split_file_is_refused_with_what_to_do(
    number: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(tmp_path, checkpoint, {"split.count": 2, "split.no": number})
    with pytest.raises(CheckpointError, match=r"one\.gguf is one of 2 parts .*--merge"):
        GGUFFile(path)


def test_a_file_in_the_other_order_of_bytes_is_refused(tmp_path: Path) -> None:
    """The package `gguf` reads its metadata, but would dequantize other numbers."""
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.ones((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"one\.gguf .*big-endian.*gguf-convert-endian"):
        GGUFFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one\.gguf"):
        GGUFFile(tmp_path / "one.gguf")


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"garbage" * 100, b"GGUF" + b"\xff" * 100, b"GGUF\3\0\0\0" + b"\1" * 90]
)
def test_a_file_of_something_else_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"one\.gguf"):
        GGUFFile(tmp_path / "one.gguf")


def test_a_file_truncated_anywhere_is_named(written: Callable[..., Path], tmp_path: Path) -> None:
    content = written("llama").read_bytes()
    for size in [
        *range(1, 400, 7),
        *range(400, len(content) - 1, len(content) // 40),
        len(content) - 64,
    ]:
        (tmp_path / "one.gguf").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"one\.gguf"):
            GGUFFile(tmp_path / "one.gguf")


def test_a_head_count_that_does_not_fit_the_tensors_is_an_error_of_the_checkpoint(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(
        tmp_path, checkpoint, {".attention.head_count": 5, ".attention.key_length": 15}
    )
    with pytest.raises(CheckpointError, match=r"one\.gguf"):
        GGUFFile(path)
