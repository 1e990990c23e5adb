"""What config.json says about quantized weights, and what is refused of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint import ModelConfig, Quantization, StoredFormat
from minisgl.errors import CheckpointError
from tests.checkpoint.test_config import NEEDED
from tests.quantized import SCHEMES, compressed_config, fp8_config, group

Q_PROJ = "model.layers.0.self_attn.q_proj"


def read(folder: Path, config: Any, field: str = "quantization_config") -> Quantization | None:
    (folder / "config.json").write_text(json.dumps({**NEEDED, field: config}))
    return ModelConfig.from_folder(folder).quantization


def format_of(folder: Path, config: Any, layer: str = Q_PROJ) -> StoredFormat | None:
    quantization = read(folder, config)
    assert quantization is not None
    return quantization.format_of(layer)


def test_a_plain_checkpoint_has_no_quantization(tmp_path: Path) -> None:
    assert read(tmp_path, None) is None
    assert read(tmp_path, {}) is None


FORMATS = {
    "fp8 blocks": StoredFormat("F8_E4M3", 8, (16, 16)),
    "fp8 tensor": StoredFormat("F8_E4M3", 8, None),
    "compressed fp8 channel": StoredFormat("F8_E4M3", 8, None),
    "compressed fp8 blocks": StoredFormat("F8_E4M3", 8, (16, 16)),
    "compressed int8 channel": StoredFormat("I8", 8, None),
    "compressed int8 channel with zero points": StoredFormat("I8", 8, None, has_zero_point=True),
    "compressed int4 groups": StoredFormat("I32", 4, (1, 16)),
    "compressed int4 groups with zero points": StoredFormat("I32", 4, (1, 16), has_zero_point=True),
    "compressed packed int8 groups": StoredFormat("I32", 8, (1, 16)),
}


@pytest.mark.parametrize("scheme", FORMATS)
def test_the_format_of_a_layer(scheme: str, tmp_path: Path) -> None:
    assert format_of(tmp_path, SCHEMES[scheme].config) == FORMATS[scheme]


def test_the_field_of_older_files_is_read(tmp_path: Path) -> None:
    quantization = read(tmp_path, SCHEMES["compressed int4 groups"].config, "compression_config")
    assert quantization is not None
    assert quantization.method == "compressed-tensors"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int4", "compression_config must be an object, got 'int4'"),
        ({"quant_method": "bitmask"}, "compression_config: .* 'bitmask' are not supported"),
        ({"format": "pack-quantized"}, "compression_config: .* None are not supported"),
    ],
)
def test_what_is_wrong_with_the_older_field_is_said_of_it(
    config: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read(tmp_path, config, "compression_config")


def test_two_fields_that_differ_are_refused(tmp_path: Path) -> None:
    older = {"compression_config": SCHEMES["compressed int4 groups"].config}
    newer = {"quantization_config": SCHEMES["compressed int8 channel"].config}
    (tmp_path / "config.json").write_text(json.dumps({**NEEDED, **older, **newer}))
    with pytest.raises(CheckpointError, match="quantization_config and compression_config differ"):
        ModelConfig.from_folder(tmp_path)


MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
}


@pytest.mark.parametrize("content", [MODELOPT, {}, {"quantization": "FP8"}], ids=str)
def test_the_file_of_modelopt_is_refused_by_name(content: Any, tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: .*modelopt.*not supported"):
        read(tmp_path, None)


def test_the_file_of_modelopt_says_what_is_quantized(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    with pytest.raises(CheckpointError, match="'quant_algo': 'NVFP4'"):
        read(tmp_path, None)


def test_a_group_names_its_layers_before_the_others_take_the_rest(tmp_path: Path) -> None:
    config = SCHEMES["compressed mixed"].config
    down = format_of(tmp_path, config, "model.layers.0.mlp.down_proj")
    assert down == StoredFormat("F8_E4M3", 8, None)
    assert format_of(tmp_path, config) == StoredFormat("I32", 4, (1, 16))


def test_a_group_without_weights_quantizes_none(tmp_path: Path) -> None:
    activations = {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}}
    assert format_of(tmp_path, compressed_config("int-quantized", activations)) is None


def test_a_strategy_that_is_not_written_follows_from_the_group_size(tmp_path: Path) -> None:
    sizes = {None: None, -1: None, 32: (1, 32)}
    for group_size, block in sizes.items():
        weights = {"num_bits": 4, "type": "int", "group_size": group_size}
        config = compressed_config("pack-quantized", {"targets": ["Linear"], "weights": weights})
        stored_format = format_of(tmp_path, config)
        assert stored_format is not None
        assert stored_format.block == block


@pytest.mark.parametrize(
    ("pattern", "layer", "is_ignored"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head_2", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*lm_head", "lm_head", True),
        (r"re:.*mlp\.gate$", "model.layers.0.mlp.gate", True),
        (r"re:.*mlp\.gate$", "model.layers.0.mlp.gate_proj", False),
        (r"re:mlp", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_ignored_layers_are_plain(
    pattern: str, layer: str, is_ignored: bool, tmp_path: Path
) -> None:
    fp8 = fp8_config(modules_to_not_convert=[pattern])
    compressed = {**SCHEMES["compressed int4 groups"].config, "ignore": [pattern]}
    for config in (fp8, compressed):
        assert (format_of(tmp_path, config, layer) is None) == is_ignored


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "mxfp4", "modelopt", None])
def test_an_unknown_method_is_named_with_those_there_are(
    method: str | None, tmp_path: Path
) -> None:
    message = f"quantized by {method!r} are not supported; there is fp8, compressed-tensors"
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        read(tmp_path, {"quant_method": method, "bits": 4})


def int4(**fields: Any) -> dict[str, Any]:
    return compressed_config(
        "pack-quantized", group("int", 4, "group", **{"group_size": 16, **fields})
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ("fp8", "must be an object"),
    "quantized kv cache": (
        {**int4(), "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        "kv_cache_scheme is not supported",
    ),
    "quantized kv cache with fp8": (
        fp8_config(kv_cache_scheme={"num_bits": 8}),
        "fp8: kv_cache_scheme is not supported",
    ),
    "sparse": (
        {**int4(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is not supported.*sparse-24-bitmask",
    ),
    "rotated": ({**int4(), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "another fp8": (fp8_config(fmt="e5m2"), "fmt must be 'e4m3', got 'e5m2'"),
    "fp4 experts": (fp8_config(expert_dtype="fp4"), "expert_dtype must be 'fp8', got 'fp4'"),
    "a block of one size": (
        fp8_config(weight_block_size=[128]),
        "weight_block_size: .* two positive integers",
    ),
    "a block of nothing": (fp8_config(weight_block_size=[0, 128]), "two positive integers"),
    "unknown format": (
        compressed_config("nvfp4-pack-quantized", group("float", 4, "tensor_group")),
        "format 'nvfp4-pack-quantized' of float4 weights is not supported; .*pack-quantized int4",
    ),
    "unknown bits": (
        compressed_config("pack-quantized", group("int", 3, "channel")),
        "format 'pack-quantized' of int3 weights is not supported",
    ),
    "unknown strategy": (
        compressed_config("pack-quantized", group("int", 4, "attn_head")),
        "strategy 'attn_head' is not supported",
    ),
    "ordered by activations": (int4(actorder="group"), "ordered by activations"),
    "fp8 with a zero point": (
        compressed_config("float-quantized", group("float", 8, "channel", symmetric=False)),
        "float8 weights with a zero point",
    ),
    "preset": (
        {**int4(), "config_groups": {"W4A16": ["Linear"]}},
        "the preset 'W4A16' is not supported",
    ),
    "no groups": ({"quant_method": "compressed-tensors"}, "'config_groups' is missing"),
    "no object of groups": (
        {**int4(), "config_groups": 5},
        r"config\.json: .*config_groups must be an object, got 5",
    ),
    "no object of weights": (
        {**int4(), "config_groups": {"a": {"targets": ["Linear"], "weights": [4]}}},
        r"weights of 'a' must be an object, got \[4\]",
    ),
    "no targets": (
        {**int4(), "config_groups": {"a": {"weights": {"num_bits": 4}}}},
        "the field targets of 'a' is missing",
    ),
    "no size of groups": (
        compressed_config(
            "pack-quantized",
            {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": "16"}},
        ),
        "group_size must be an integer, got '16'",
    ),
    "no number of bits": (int4(num_bits=[4]), r"int\[4\] weights is not supported"),
    "no list of names": ({**int4(), "ignore": "lm_head"}, "ignore must be a list of texts"),
    "no list of plain layers": (
        fp8_config(modules_to_not_convert=5),
        "modules_to_not_convert must be a list of texts.*, got 5",
    ),
    "no expression": ({**int4(), "ignore": ["re:("]}, "no regular expression"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, config)


def test_a_dense_sparsity_config_asks_for_nothing(tmp_path: Path) -> None:
    config = {**int4(), "sparsity_config": {"format": "dense", "targets": []}}
    assert format_of(tmp_path, config) == StoredFormat("I32", 4, (1, 16))
