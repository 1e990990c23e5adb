"""GGUF files as Hugging Face folders: config, tokenizer, and what is refused."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.checkpoint import ModelConfig, RotaryConfig
from minisgl.checkpoint.gguf import GGUFFile
from minisgl.checkpoint.gguf_folder import hf_config, write_hf_folder
from minisgl.errors import CheckpointError
from minisgl.models import open_checkpoint
from minisgl.models.gguf_file import GGUFCheckpoint
from tests.checkpoint.gguf_files import saved_weights, with_fields, write_gguf
from tests.checkpoints import (
    CONTEXT,
    EOS_ID,
    IM_END_ID,
    VOCAB_SIZE,
    add_python,
    tiny_checkpoint,
    tiny_model,
)

CPU = torch.device("cpu")
NUM_TOKENS = VOCAB_SIZE - 1  # of the file's vocabulary; the model has one row more
Checkpoints = Callable[[str], Path]


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


def test_every_end_token_of_the_file_is_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 7}
    assert config_of(with_fields(tmp_path, checkpoint, fields), tmp_path / "out").eos_ids == {
        EOS_ID,
        3,
        7,
    }


@pytest.mark.parametrize(
    ("declared", "ends"),
    [
        ({}, {EOS_ID, IM_END_ID}),
        ({"eos_token_id": 7}, {7, IM_END_ID}),
        ({"eot_token_id": 8}, {EOS_ID, 8}),
        ({"eos_token_id": 7, "eot_token_id": 8}, {7, 8}),
        ({"eos_token_id": 7, "eos_token_ids": [7, 9], "eot_token_id": 8}, {7, 8, 9}),
    ],
    ids=str,
)
def test_an_end_token_that_is_not_declared_is_found_by_its_text(
    declared: dict[str, Any], ends: set[int], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    fields = {"eos_token_id": None, **declared}
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    path = with_fields(tmp_path, checkpoint, named)
    assert set(hf_config(GGUFFile(path))["eos_token_id"]) == ends


@pytest.mark.parametrize("name", ["bos", "eos", "unknown", "padding", "eot", "eom"])
@pytest.mark.parametrize("token", [NUM_TOKENS, 1.5, "x", True, [1, 2]], ids=str)
def test_an_id_that_is_no_token_of_the_file_is_refused_by_name(
    name: str, token: Any, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    field = f"tokenizer.ggml.{name}_token_id"
    message = f"{field} must be a whole number in [0, {NUM_TOKENS}), got {token!r}"
    path = with_fields(tmp_path, checkpoint, {field: token})
    with pytest.raises(CheckpointError, match=re.escape(f"one.gguf: {message}")):
        write_hf_folder(path, tmp_path / "out")


@pytest.mark.parametrize("tokens", [[NUM_TOKENS], [EOS_ID, -1], ["x"], NUM_TOKENS, "x"], ids=str)
def test_a_list_of_ends_with_an_id_that_is_no_token_is_refused_by_name(
    tokens: Any, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    field = "tokenizer.ggml.eos_token_ids"
    message = f"{field} must be a list, got {tokens!r}"
    if isinstance(tokens, list):
        bounds = f"a whole number in [0, {NUM_TOKENS})"
        message = f"an item of {field} must be {bounds}, got {tokens[-1]!r}"
    path = with_fields(tmp_path, checkpoint, {field: tokens})
    with pytest.raises(CheckpointError, match=re.escape(f"one.gguf: {message}")):
        write_hf_folder(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value", "expected", "got"),
    [
        ("tokenizer.ggml.add_bos_token", "true", "a bool", "a string"),
        ("tokenizer.ggml.add_bos_token", 1.0, "a bool", "a float32"),
        ("tokenizer.ggml.add_bos_token", 1, "a bool", "a uint32"),
        ("tokenizer.ggml.add_eos_token", "false", "a bool", "a string"),
        ("tokenizer.ggml.add_space_prefix", 0, "a bool", "a uint32"),
        ("tokenizer.ggml.tokens", [1, 2], "an array of strings", "an array of int32"),
        ("tokenizer.ggml.tokens", "a", "an array of strings", "a string"),
        ("tokenizer.ggml.merges", [1, 2], "an array of strings", "an array of int32"),
        ("tokenizer.ggml.token_type", ["1"], "an array of integers", "an array of string"),
        ("tokenizer.ggml.scores", ["1"], "an array of numbers", "an array of string"),
        ("tokenizer.ggml.model", 2, "a string", "a uint32"),
        ("tokenizer.ggml.pre", 2, "a string", "a uint32"),
        ("tokenizer.chat_template", True, "a string", "a bool"),
        ("llama.block_count", "2", "an integer", "a string"),
        ("llama.context_length", 2.0, "an integer", "a float32"),
        ("llama.attention.head_count", "4", "an integer", "a string"),
        ("llama.attention.head_count_kv", [2, 2], "an integer", "an array of int32"),
        ("llama.attention.key_length", True, "an integer", "a bool"),
        ("llama.attention.layer_norm_rms_epsilon", "1", "a number", "a string"),
        ("llama.attention.causal", 1, "a bool", "a uint32"),
        ("llama.expert_weights_norm", "false", "a bool", "a string"),
        ("llama.logit_scale", "1", "a number", "a string"),
        ("llama.rope.freq_base", "10000", "a number", "a string"),
        ("llama.rope.scaling.type", 1, "a string", "a uint32"),
        ("llama.rope.scaling.factor", "2", "a number", "a string"),
        ("split.count", "2", "an integer", "a string"),
        ("general.architecture", 1, "a string", "a uint32"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name_and_type(
    name: str, value: Any, expected: str, got: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(tmp_path, checkpoint, {name: value})
    message = f"one.gguf: {name} must be {expected}, and it is {got}"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_hf_folder(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({".block_count": 0}, "llama.block_count must be a positive integer, got 0"),
        ({".block_count": None}, "the field 'llama.block_count' is missing"),
        ({".context_length": None}, "the field 'llama.context_length' is missing"),
        ({".feed_forward_length": 0}, "llama.feed_forward_length must be a positive integer"),
        (
            {".attention.head_count_kv": 3, ".attention.key_length": None},
            "has 32 rows for 3 heads of 16 (llama.attention.head_count_kv)",
        ),
        ({".attention.head_count": 0}, "the field llama.attention.head_count is missing or 0"),
        (
            {".attention.layer_norm_rms_epsilon": -1.0},
            "llama.attention.layer_norm_rms_epsilon must be a finite number",
        ),
        ({".rope.freq_base": 0.0}, "llama.rope.freq_base must be a positive number"),
        ({".rope.scaling.type": "yarn"}, "the llama.rope.scaling.factor of the rope type 'yarn'"),
        (
            {".rope.scaling.type": "linear", ".rope.scale_linear": -2.0},
            "the llama.rope.scale_linear of the rope type 'linear'",
        ),
        ({".rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({".logit_scale": 0.5}, "llama.logit_scale is not supported, it is 0.5"),
        ({".attention.sliding_window": 0}, "llama.attention.sliding_window must be a positive"),
    ],
    ids=str,
)
def test_a_value_that_is_not_supported_is_refused_by_the_name_in_the_file(
    fields: dict[str, Any], message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(tmp_path, checkpoint, fields)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        config_of(path, tmp_path / "out")
    assert str(error.value).startswith(f"{path}: ")


def test_a_width_of_heads_that_is_computed_is_refused_by_the_fields_that_it_comes_of(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    fields = {".attention.head_count": 64, ".attention.key_length": None}
    weights = saved_weights(checkpoint("qwen2"))
    path = write_gguf(tmp_path / "one.gguf", tiny_model("qwen2"), weights, fields=fields)
    message = "qwen2.embedding_length / qwen2.attention.head_count must be an even integer"
    with pytest.raises(CheckpointError, match=message):
        config_of(path, tmp_path / "out")


def test_the_last_token_of_the_file_may_end_an_answer(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    last = NUM_TOKENS - 1
    fields = {"tokenizer.ggml.eos_token_id": last, "tokenizer.ggml.eos_token_ids": [0, last]}
    config = config_of(with_fields(tmp_path, checkpoint, fields), tmp_path / "out")
    assert config.eos_ids >= {0, last}


def test_rope_frequencies_become_divisors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = with_fields(tmp_path, checkpoint, {}, tensors={"rope_freqs.weight": divisors})
    rotary = rope_of(config_of(path, tmp_path / "out"))
    assert (rotary.kind, rotary.scaling) == ("divided", {"divisors": divisors.tolist()})


@pytest.mark.parametrize("number", [1, 7, 16])
def test_rope_frequencies_of_another_width_are_refused(
    number: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    divisors = np.ones(number, dtype=np.float32)
    path = with_fields(tmp_path, checkpoint, {}, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(
        CheckpointError, match=f"rope_freqs.weight has {number} numbers, expected 8"
    ):
        hf_config(GGUFFile(path))


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


def test_the_rotation_that_ollama_writes_for_wide_heads_is_the_whole_one(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    """It divides the width of a llama by its heads, and leaves the width of a head out."""
    for arch in ("llama", "qwen3"):
        model = tiny_model(arch, head_dim=32)
        assert model.config.hidden_size // model.config.num_attention_heads == 16
        folder = tiny_checkpoint(arch, tmp_path / arch, head_dim=32)
        for count in (32, 16, 8):
            path = write_gguf(
                tmp_path / "one.gguf",
                model,
                saved_weights(folder),
                fields={".rope.dimension_count": count},
            )
            if count == 32 or (arch, count) == ("llama", 16):
                assert rope_of(config_of(path, tmp_path / f"{arch}{count}")).head_dim == 32
            else:
                with pytest.raises(CheckpointError, match=rf"dimension_count .* it is {count}, "):
                    hf_config(GGUFFile(path))


def test_weights_of_experts_are_normed_unless_the_file_says_otherwise(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for name in (".expert_weights_norm", ".norm_top_k_prob"):  # llama.cpp's, Ollama's
        for value, is_normed in ((None, True), (True, True), (False, False)):
            path = with_fields(tmp_path, checkpoint, {name: value})
            assert hf_config(GGUFFile(path))["norm_topk_prob"] == is_normed


def test_a_file_without_a_theta_has_the_default_one(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = with_fields(tmp_path, checkpoint, {".rope.freq_base": None})
    assert rope_of(config_of(path, tmp_path / "out")).theta == 10000.0


def test_a_sliding_window_is_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = with_fields(tmp_path, checkpoint, {".attention.sliding_window": 100})
    assert [spec.window for spec in config_of(path, tmp_path / "out").attention] == [100, 100]


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


def test_a_file_without_an_embedding_is_an_error_of_the_checkpoint(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    weights = saved_weights(checkpoint("llama"))
    del weights["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        write_hf_folder(
            write_gguf(tmp_path / "one.gguf", tiny_model("llama"), weights), tmp_path / "out"
        )


def test_the_context_is_that_of_the_file(written: Callable[..., Path]) -> None:
    assert hf_config(GGUFFile(written("qwen2")))["max_position_embeddings"] == CONTEXT
