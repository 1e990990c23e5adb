"""GGUF files under Hugging Face's names: tensors, whole and in parts, and damaged files."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from minisgl.checkpoint import ModelConfig, RotaryConfig
from minisgl.checkpoint.gguf import GGUFFile
from minisgl.checkpoint.gguf_folder import hf_config, write_hf_folder
from minisgl.errors import CheckpointError
from minisgl.models import BaseLLMModel, get_model_class, open_checkpoint
from minisgl.models.gguf_file import GGUFCheckpoint
from tests.checkpoint.gguf_files import Array, permuted, saved_weights, write_gguf
from tests.checkpoints import (
    CONTEXT,
    EOS_ID,
    IN_GGUF,
    VOCAB_SIZE,
    add_python,
    tiny_checkpoint,
    tiny_model,
)
from tests.distributed.groups import Alone

CPU = torch.device("cpu")
TYPES = [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_1]
Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(
    checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Type], Path]:
    """From an architecture and a type to a file, made once; not to be written to."""
    root = tmp_path_factory.mktemp("gguf")

    @cache
    def write(arch: str, type_: Type = Type.F32) -> Path:
        folder = checkpoint(arch)
        return write_gguf(
            root / f"{arch}-{type_.name}.gguf",
            tiny_model(arch),
            saved_weights(folder),
            lambda _: type_,
        )

    return write


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
    for rank, num_tokens in enumerate((160, 141)):  # of 301, in words of 32
        assert rows_of(rank, 2) == shared + divided / 2 + len(of_tokens) * num_tokens


def config_of(path: Path, folder: Path) -> ModelConfig:
    """As it is read from the folder that the file unpacks to."""
    write_hf_folder(path, folder)
    return ModelConfig.from_folder(folder)


def rope_of(config: ModelConfig) -> RotaryConfig:
    rope = config.attention[0].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_unpacked_config_says_what_the_checkpoints_says(
    arch: str, checkpoint: Checkpoints, written: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_of(written(arch), tmp_path)
    expected = ModelConfig.from_folder(checkpoint(arch))
    fields = [
        "architecture",
        "vocab_size",
        "width",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "mlp_width",
    ]
    fields += ["activation", "max_position", "tied_embeddings", "attention"]
    fields += ["num_experts", "experts_per_token", "expert_width", "dense_layers"]
    for field in [*fields, "normalize_experts"] if arch == "qwen3_moe" else fields:
        assert getattr(config, field) == getattr(expected, field), field
    assert config.norm_eps == pytest.approx(expected.norm_eps)


def test_mistral_unpacks_as_a_llama(written: Callable[..., Path], tmp_path: Path) -> None:
    assert config_of(written("mistral"), tmp_path).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_embeddings_are_tied_if_there_is_no_output_tensor(arch: str, tmp_path: Path) -> None:
    for tied in (True, False):
        folder = tiny_checkpoint(arch, tmp_path / f"{tied}", tie_word_embeddings=tied)
        weights = saved_weights(folder)
        assert ("lm_head.weight" in weights) != tied
        path = write_gguf(
            tmp_path / f"{tied}.gguf", tiny_model(arch, tie_word_embeddings=tied), weights
        )
        assert hf_config(GGUFFile(path))["tie_word_embeddings"] == tied


def with_fields(folder: Path, checkpoint: Checkpoints, fields: dict[str, Any], **more: Any) -> Path:
    return write_gguf(
        folder / "one.gguf",
        tiny_model("llama"),
        saved_weights(checkpoint("llama")),
        fields=fields,
        **more,
    )


def test_every_end_token_of_the_file_is_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 7}
    assert config_of(with_fields(tmp_path, checkpoint, fields), tmp_path / "out").eos_ids == {
        EOS_ID,
        3,
        7,
    }


def test_a_file_without_an_end_token_has_none(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = with_fields(tmp_path, checkpoint, {"tokenizer.ggml.eos_token_id": None})
    assert hf_config(GGUFFile(path))["eos_token_id"] == []


def test_rope_frequencies_become_divisors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = with_fields(tmp_path, checkpoint, {}, tensors={"rope_freqs.weight": divisors})
    rotary = rope_of(config_of(path, tmp_path / "out"))
    assert (rotary.kind, rotary.scaling) == ("divided", {"divisors": divisors.tolist()})


@pytest.mark.parametrize(
    ("fields", "kind", "scaling"),
    [
        ({".rope.scaling.type": "none"}, "default", {}),
        ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, "linear", {"factor": 4.0}),
        (
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 64,
            },
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.yarn_beta_fast": 8.0,
                ".rope.scaling.yarn_beta_slow": 2.0,
            },
            "yarn",
            {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
        ),
        # A factor without a type is llama.cpp's oldest way to say "linear".
        ({".rope.scaling.factor": 4.0}, "linear", {"factor": 4.0}),
        ({".rope.scale_linear": 4.0}, "linear", {"factor": 4.0}),
        ({".rope.scaling.type": "none", ".rope.scaling.factor": 0.0}, "default", {}),
    ],
)
def test_rope_scaling_is_read(
    fields: dict[str, Any],
    kind: str,
    scaling: dict[str, Any],
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    rotary = rope_of(config_of(with_fields(tmp_path, checkpoint, fields), tmp_path / "out"))
    assert (rotary.kind, rotary.scaling) == (kind, scaling)


def test_divisors_of_a_linear_rope_are_multiplied(checkpoint: Checkpoints, tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    stretched = {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}
    path = with_fields(tmp_path, checkpoint, stretched, tensors={"rope_freqs.weight": divisors})
    assert rope_of(config_of(path, tmp_path / "out")).scaling["divisors"] == list(2 * divisors)

    yarn = {**stretched, ".rope.scaling.type": "yarn"}
    path = with_fields(tmp_path, checkpoint, yarn, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match=r"rope_freqs beside the rope\.scaling\.type 'yarn'"):
        hf_config(GGUFFile(path))


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("attention.causal", False, True),
        ("attention.scale", 0.5, 0.25),
        ("attn_logit_softcapping", 30.0, 0.0),
        ("expert_gating_func", 2, 1),
        ("expert_shared_count", 1, 0),
        ("expert_weights_scale", 2.5, 1.0),
        ("logit_scale", 0.5, 1.0),
        ("residual_scale", 0.5, 1.0),
        ("rope.dimension_count", 8, 16),
        ("rope.scaling.yarn_attn_factor", 1.5, 1.0),
        ("rope.scaling.yarn_log_multiplier", 0.1, 0.0),
    ],
)
def test_a_field_that_would_change_what_is_computed_is_refused_by_name(
    name: str, value: Any, harmless: Any, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    hf_config(GGUFFile(with_fields(tmp_path, checkpoint, {f".{name}": harmless})))
    with pytest.raises(
        CheckpointError, match=rf"one\.gguf: .*{name} is not supported, it is {value}"
    ):
        hf_config(GGUFFile(with_fields(tmp_path, checkpoint, {f".{name}": value})))


def test_weights_of_experts_are_normed_unless_the_file_says_otherwise(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for value, is_normed in ((None, True), (True, True), (False, False)):
        path = with_fields(tmp_path, checkpoint, {".expert_weights_norm": value})
        assert hf_config(GGUFFile(path))["norm_topk_prob"] == is_normed


def test_a_file_without_a_theta_has_the_default_one(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(tmp_path, checkpoint, {".rope.freq_base": None})
    assert rope_of(config_of(path, tmp_path / "out")).theta == 10000.0


def test_a_sliding_window_is_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = with_fields(tmp_path, checkpoint, {".attention.sliding_window": 100})
    assert [spec.window for spec in config_of(path, tmp_path / "out").attention] == [100, 100]


def test_biases_of_a_llama_are_used(tmp_path: Path) -> None:
    """The file says so only by having the tensors."""
    biases = {"attention_bias": True}
    weights = saved_weights(tiny_checkpoint("llama", tmp_path / "hf", **biases))
    path = write_gguf(tmp_path / "one.gguf", tiny_model("llama", **biases), weights)
    for name, weight in weights.items():
        assert torch.equal(read(source_of(path), name, weight), torch.from_numpy(weight)), name
    assert config_of(path, tmp_path / "out").attention_bias


def test_the_unpacked_folder_has_the_weights_and_the_tokenizer(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    write_hf_folder(written("llama"), tmp_path)
    assert isinstance(open_checkpoint(tmp_path, torch.float32, CPU), GGUFCheckpoint)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "The quick brown fox, 世界!"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_nothing_beside_a_file_is_read(
    written: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all Python that files beside it name, whatever the terminal would answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 5))
    alone = tmp_path / "alone"
    write_hf_folder(written("llama"), alone)
    crowded = tmp_path / "crowded" / "model.gguf"
    crowded.parent.mkdir()
    crowded.write_bytes(written("llama").read_bytes())
    ran = tmp_path / "ran"
    add_python(crowded.parent, ran)
    (crowded.parent / "tokenizer.json").write_text("{}")
    (crowded.parent / "chat_template.jinja").write_text("of another model")
    write_hf_folder(crowded, tmp_path / "out")
    assert not ran.exists()
    for path in alone.glob("*.json*"):
        assert (tmp_path / "out" / path.name).read_text() == path.read_text(), path.name


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


@pytest.mark.parametrize(
    "missing",
    [
        ".block_count",
        ".context_length",
        ".embedding_length",
        ".attention.head_count",
        ".feed_forward_length",
    ],
)
def test_a_file_without_a_needed_field_is_an_error_of_the_checkpoint(
    missing: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"missing|cannot"):
        config_of(with_fields(tmp_path, checkpoint, {missing: None}), tmp_path / "out")


def test_a_head_count_that_does_not_fit_the_tensors_is_an_error_of_the_checkpoint(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(
        tmp_path, checkpoint, {".attention.head_count": 5, ".attention.key_length": 15}
    )
    with pytest.raises(CheckpointError, match=r"one\.gguf"):
        GGUFFile(path)


def test_a_file_without_an_embedding_is_an_error_of_the_checkpoint(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    weights = saved_weights(checkpoint("llama"))
    del weights["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        write_hf_folder(
            write_gguf(tmp_path / "one.gguf", tiny_model("llama"), weights), tmp_path / "out"
        )


def test_a_tokenizer_that_cannot_be_converted_is_an_error_of_the_checkpoint(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(
        tmp_path, checkpoint, {"tokenizer.ggml.tokens": None, "tokenizer.ggml.model": "martian"}
    )
    with pytest.raises(CheckpointError, match=r"the tokenizer of .*one\.gguf cannot be converted"):
        write_hf_folder(path, tmp_path / "out")


def test_the_context_is_that_of_the_file(written: Callable[..., Path]) -> None:
    assert hf_config(GGUFFile(written("qwen2")))["max_position_embeddings"] == CONTEXT
