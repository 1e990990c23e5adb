"""config.json and generation_config.json: what they say, and how they can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Olmo3Config

from minisgl.checkpoint import AttentionSpec, ModelConfig, RotaryConfig
from minisgl.errors import CheckpointError
from minisgl.models import get_model_class
from minisgl.models.register import MODELS
from minisgl.utils.excerpts import excerpt
from tests.checkpoints import ARCHITECTURES, CONTEXT, EOS_ID, IM_END_ID, VOCAB_SIZE, tiny_model

NEEDED = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
MOE = {
    **NEEDED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

# What is empty and of the field's type.
MEANINGFUL = [
    ("mlp_only_layers", []),
    ("use_sliding_window", False),
]


def read(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_transformers_saved_is_read_as_it_was(
    arch: str, checkpoint: Callable[[str], Path]
) -> None:
    model = tiny_model(arch)
    config = ModelConfig.from_folder(checkpoint(arch))
    assert config.architecture == type(model).__name__
    assert (config.vocab_size, config.max_position) == (VOCAB_SIZE, CONTEXT)
    assert (config.width, config.mlp_width, config.num_layers) == (64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (
        4,
        2,
        32 if arch == "qwen3" else 16,
    )
    assert config.tied_embeddings == (arch == "qwen2")
    assert config.norm_eps == model.config.rms_norm_eps
    assert config.eos_ids == {EOS_ID, IM_END_ID}
    assert get_model_class(config.architecture).__name__ == config.architecture
    if arch == "qwen3_moe":
        assert (config.num_experts, config.experts_per_token, config.expert_width) == (4, 2, 32)
        assert config.normalize_experts


def test_fields_that_may_be_absent_have_their_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, NEEDED)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    rope = RotaryConfig(head_dim=16, theta=10000.0, max_position=512)
    assert config.activation == "silu"
    assert config.attention == (AttentionSpec(scale=0.25, rope=rope),) * 2
    assert not (config.tied_embeddings or config.attention_bias or config.mlp_bias)
    assert config.num_experts == 0
    assert (config.eos_ids, config.sampling_defaults) == (frozenset(), {})


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(name: str, tmp_path: Path) -> None:
    """Checkpoints on the hub say num_experts; transformers 5 saves num_local_experts."""
    assert read(tmp_path, {**MOE, name: 6}).num_experts == 6


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [1, 2]}, {1, 2}),
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {0, 1, 2, 3}),
        ({"mlp_only_layers": None}, set()),
        ({"mlp_only_layers": [-1, 4, 7]}, set()),
        ({"num_experts": 0, "decoder_sparse_step": 0}, {0, 1, 2, 3}),
    ],
)
def test_dense_layers_are_those_that_the_step_skips_and_those_named(
    fields: dict[str, Any], dense: set[int], tmp_path: Path
) -> None:
    config = read(tmp_path, {**MOE, "num_hidden_layers": 4, "num_experts": 4, **fields})
    assert config.dense_layers == dense


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
        ({"decoder_sparse_step": None}, "decoder_sparse_step must be a positive integer, got None"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers, got 1"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of layers, got"),
    ],
)
def test_dense_layers_that_cannot_be_are_refused_by_name(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**MOE, "num_experts": 4, **fields})


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (None, None, set()),
        (5, None, {5}),
        ([5, 6], None, {5, 6}),
        (None, 7, {7}),
        (0, [0], {0}),
        (5, [6, 7], {5, 6, 7}),
        ([5, 6], 6, {5, 6}),
    ],
)
def test_eos_ids_are_those_of_both_files(
    in_config: Any, in_generation: Any, expected: set[int], tmp_path: Path
) -> None:
    config = read(tmp_path, {**NEEDED, "eos_token_id": in_config}, {"eos_token_id": in_generation})
    assert config.eos_ids == expected


def test_a_missing_generation_config_leaves_the_eos_ids_of_the_config(tmp_path: Path) -> None:
    assert read(tmp_path, {**NEEDED, "eos_token_id": [3, 4]}).eos_ids == {3, 4}


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    config = read(tmp_path, NEEDED, {**generation, "do_sample": True, "pad_token_id": 1})
    assert config.sampling_defaults == generation


@pytest.mark.parametrize(
    "generation",
    [{}, {"top_k": 0}, {"repetition_penalty": 1.0}, {"temperature": None}, {"do_sample": False}],
)
def test_what_is_no_recommendation_is_not_taken_for_one(
    generation: dict[str, Any], tmp_path: Path
) -> None:
    assert read(tmp_path, NEEDED, generation).sampling_defaults == {}


@pytest.mark.parametrize("ids", ["2", [1, 2.5], [[1]], True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ends_of_sequence_that_are_no_token_ids_are_refused(
    file: str, ids: Any, tmp_path: Path
) -> None:
    fields: dict[str, dict[str, Any]] = {"config.json": NEEDED, "generation_config.json": {}}
    fields[file] = {**fields[file], "eos_token_id": ids}
    with pytest.raises(CheckpointError, match=f"{file}: eos_token_id must be .*, got") as refusal:
        read(tmp_path, fields["config.json"], fields["generation_config.json"])
    assert f"/{file}: " in str(refusal.value)


@pytest.mark.parametrize(
    "field",
    [
        *("architectures", "hidden_act", "hidden_size", "num_key_value_heads", "head_dim"),
        *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_type", "layer_types"),
        *("sliding_window", "use_sliding_window", "mlp_only_layers"),
        *("attention_bias", "torch_dtype", "model_type", "eos_token_id"),
        *("partial_rotary_factor", "quantization_config"),
    ],
)
def test_a_long_value_is_cut_where_it_is_refused(field: str, tmp_path: Path) -> None:
    long = [["x" * 10**5]]
    rope = {"rope_scaling": {"rope_type": long, "factor": 2.0}}
    wrong = rope if field == "rope_type" else {field: long}
    with pytest.raises(CheckpointError) as refusal:
        read(tmp_path, {**MOE, "num_experts": 4, "use_sliding_window": True, **wrong})
    assert "xxx...xxx" in str(refusal.value)
    assert len(str(refusal.value)) < 500 + len(str(tmp_path))


FULL = "full_attention"
SLIDING = "sliding_attention"
USED = {"use_sliding_window": True, "sliding_window": 128}


@pytest.mark.parametrize(
    ("arch", "fields", "windows"),
    [
        ("Llama", {"sliding_window": 128}, [None] * 4),
        ("Llama", USED, [None] * 4),
        ("Mistral", {}, [4096] * 4),
        ("Mistral", {"sliding_window": None}, [None] * 4),
        ("Mistral", {"sliding_window": 128}, [128] * 4),
        ("Mistral", {"sliding_window": 128, "layer_types": [FULL] * 4}, [None] * 4),
        ("Qwen2", {"sliding_window": 128}, [None] * 4),
        ("Qwen2", USED, [None] * 4),
        ("Qwen2", {**USED, "max_window_layers": 1}, [None, 128, 128, 128]),
        ("Qwen2", {**USED, "max_window_layers": 2, "layer_types": None}, [None, None, 128, 128]),
        ("Qwen3", {**USED, "max_window_layers": 3}, [None, None, None, 128]),
        ("Qwen3", {**USED, "layer_types": [SLIDING, FULL] * 2}, [128, None] * 2),
        ("Qwen3Moe", {"sliding_window": 128}, [None] * 4),
        ("Qwen3Moe", USED, [128] * 4),
        ("SmolLM3", {}, [None] * 4),
        ("SmolLM3", USED, [None, None, None, 128]),
        ("Olmo2", {"sliding_window": 128}, [None] * 4),
        ("Olmo3", {}, [4096, 4096, 4096, None]),
        ("Olmo3", {"layer_types": None}, [4096, 4096, 4096, None]),
        ("Olmo3", {"sliding_window": 7, "layer_types": [FULL, SLIDING] * 2}, [None, 7] * 2),
    ],
)
def test_windows_are_those_of_the_layers_that_slide(
    arch: str, fields: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    names = {"architectures": [f"{arch}ForCausalLM"], "num_hidden_layers": 4}
    config = read(tmp_path, {**NEEDED, **names, **fields})
    assert [spec.window for spec in config.attention] == windows


@pytest.mark.parametrize(
    "fields", [{}, {"use_sliding_window": True}, {"layer_types": [SLIDING] * 2}]
)
def test_a_window_is_refused_where_its_layers_are_not_known(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    unknown = {**NEEDED, "architectures": ["NewForCausalLM"]}
    with pytest.raises(CheckpointError, match="sliding_window is not supported for NewForCausalLM"):
        read(tmp_path, {**unknown, "sliding_window": 128, **fields})

    unused = {"sliding_window": 128, "use_sliding_window": False}
    config = read(tmp_path, {**unknown, **unused})
    assert [spec.window for spec in config.attention] == [None] * 2


@pytest.mark.parametrize("arch", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"sliding_window": 9}, {"sliding_window": 9, "use_sliding_window": False}],
)
def test_listed_sliding_layers_without_a_window_are_refused(
    arch: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    listed = {"architectures": [f"{arch}ForCausalLM"], "layer_types": [SLIDING, FULL]}
    with pytest.raises(CheckpointError, match="layer_types lists sliding_attention, but"):
        read(tmp_path, {**NEEDED, **listed, **fields})


@pytest.mark.parametrize(
    ("arch", "kind"), [("Llama", FULL), ("Olmo2", FULL), ("Qwen3Moe", SLIDING)]
)
def test_listed_layers_are_refused_where_a_model_does_not_look_at_the_list(
    arch: str, kind: str, tmp_path: Path
) -> None:
    fields = {**NEEDED, **USED, "architectures": [f"{arch}ForCausalLM"]}
    read(tmp_path, {**fields, "layer_types": [kind, kind]})
    with pytest.raises(
        CheckpointError, match=f"{arch}ForCausalLM, whose layers are all {kind}; it"
    ):
        read(tmp_path, {**fields, "layer_types": [SLIDING, FULL]})


@pytest.mark.parametrize("arch", [name for name in MODELS if not name.startswith("SmolLM3")])
@pytest.mark.parametrize("fields", [{"no_rope_layers": [0, 0]}, {"no_rope_layer_interval": 1}])
def test_layers_of_other_models_than_smollm3_are_rotated(
    arch: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, {**NEEDED, "architectures": [arch], **fields})
    assert all(spec.rope is not None for spec in config.attention)


@pytest.mark.parametrize("architecture", MODELS)
def test_each_architecture_says_which_layers_have_a_window(
    architecture: str, tmp_path: Path
) -> None:
    read(tmp_path, {**NEEDED, **USED, "architectures": [architecture]})


@pytest.mark.parametrize(
    ("fields", "has_rope"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 0]}, [False, True, True, False]),
    ],
)
def test_layers_of_smollm3_may_have_no_rope(
    fields: dict[str, Any], has_rope: list[bool], tmp_path: Path
) -> None:
    names = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
    config = read(tmp_path, {**NEEDED, **names, **fields})
    assert [spec.rope is not None for spec in config.attention] == has_rope
    assert config.tied_embeddings


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SMALL_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, 1280),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_parameters": {**YARN, "factor": 4}}, 512),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 400}}, 3200),
        ({"rope_parameters": YARN, "original_max_position_embeddings": 400}, 3200),
        ({"rope_parameters": YARN}, 512),
        ({"rope_parameters": SMALL_YARN}, 512),
        ({"rope_parameters": LLAMA3}, 512),
    ],
    ids=str,
)
def test_yarn_and_linear_scaling_lengthen_the_original_context(
    fields: dict[str, Any], length: int, tmp_path: Path
) -> None:
    """max_position_embeddings is the original length, or the lengthened one beside an original."""
    assert read(tmp_path, {**NEEDED, **fields}).max_position == length


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_the_rope_type_of_gguf_files_is_refused_of_others(field: str, tmp_path: Path) -> None:
    rope = {"rope_type": "divided", "divisors": [1.0] * 8}
    message = "config.json: rope_type 'divided' is not supported; there is default, .*, yarn$"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**NEEDED, field: rope})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 0}, r"the factor of the rope type 'llama3' must be in \(0, 1048576\], got 0"),
        ({"factor": -8.0}, r"the factor .* must be in \(0, 1048576\], got -8.0"),
        ({"factor": "8"}, "the factor .* must be in .*, got '8'"),
        ({"factor": float("nan")}, "the factor .* must be in .*, got nan"),
        ({"high_freq_factor": True}, "the high_freq_factor .* must be in .*, got True"),
        ({"low_freq_factor": -1.0}, r"the low_freq_factor .* must be in \[0, 1048576\], got -1"),
        (
            {"low_freq_factor": 4.0},
            r"the low_freq_factor .* below its high_freq_factor 4.0, got 4.0",
        ),
        ({"low_freq_factor": 9}, r"the low_freq_factor .* below its high_freq_factor 4.0, got 9"),
        ({"rope_type": []}, r"rope_type must be a text, got \[\]"),
        ({"rope_type": 0}, "rope_type must be a text, got 0"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"rope_theta": ""}, "rope_theta must be a positive number, got ''"),
        ({"rope_theta": -1e4}, "rope_theta must be a positive number, got -10000.0"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number, got an integer of"),
    ],
    ids=excerpt,
)
def test_parameters_that_leave_no_rotation_are_refused_by_name(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rope = {**LLAMA3, **scaling}
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read(tmp_path, {**NEEDED, "rope_parameters": rope})


@pytest.mark.parametrize("name", ["attention_factor", "mscale", "mscale_all_dim", "beta_fast"])
def test_a_negative_parameter_of_yarn_is_refused_by_name(name: str, tmp_path: Path) -> None:
    message = rf"config\.json: the {name} of the rope type 'yarn' must be in .*, got -1"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**NEEDED, "rope_parameters": {**YARN, name: -1}})


@pytest.mark.parametrize("truncate", [None, "no", 0])
def test_whether_bounds_of_yarn_are_truncated_is_true_or_false(
    truncate: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="the truncate of the rope type 'yarn' must be true"):
        read(tmp_path, {**NEEDED, "rope_parameters": {**YARN, "truncate": truncate}})


def test_a_theta_of_0_beside_the_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_theta must be a positive number, got 0"):
        read(tmp_path, {**NEEDED, "rope_theta": 0})


@pytest.mark.parametrize(("arch", "theta"), [("Olmo3", 5e5), ("SmolLM3", 2e6), ("Llama", 1e4)])
def test_a_theta_that_is_null_is_the_architectures_own(
    arch: str, theta: float, tmp_path: Path
) -> None:
    fields = {"architectures": [f"{arch}ForCausalLM"], "rope_theta": None}
    rope = read(tmp_path, {**NEEDED, **fields}).attention[0].rope
    assert rope is not None
    assert rope.theta == theta


def test_layers_with_a_stretched_rope_lengthen_the_context_of_all(tmp_path: Path) -> None:
    names = {"architectures": ["Olmo3ForCausalLM"], "layer_types": [SLIDING, FULL]}
    scaling = {"rope_type": "yarn", "factor": 8.0}
    assert read(tmp_path, {**NEEDED, **names, "rope_scaling": scaling}).max_position == 4096


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": None}, r"factor of the rope type 'linear' must be in \(0, .*, got None"),
        ({"factor": "2"}, "factor of the rope type 'linear' must be in .*, got '2'"),
        ({"factor": float("inf")}, "must be in .*, got inf"),
        ({"factor": 1e6}, "the context length must be at most 16777216, got 512000000"),
        (
            {"factor": 2.0, "original_max_position_embeddings": "512"},
            "original_max_position_embeddings must be a positive integer, got '512'",
        ),
    ],
    ids=str,
)
def test_a_scaling_that_cannot_lengthen_is_refused_by_name(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**NEEDED, "rope_scaling": {"type": "linear", **scaling}})


def test_a_context_is_no_longer_than_float32_tells_positions_apart(tmp_path: Path) -> None:
    most = 1 << 24
    assert torch.tensor(most - 1.0) != torch.tensor(float(most))
    assert torch.tensor(float(most)) == torch.tensor(most + 1.0)
    assert read(tmp_path, {**NEEDED, "max_position_embeddings": most}).max_position == most
    with pytest.raises(CheckpointError, match=rf"context length must be at most {most}, got"):
        read(tmp_path, {**NEEDED, "max_position_embeddings": most + 1})


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_fields_that_are_no_object_are_refused_by_name(field: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{field} must be an object, got 'yarn'"):
        read(tmp_path, {**NEEDED, field: "yarn"})


def test_rope_parameters_may_be_nested_by_layer_type(tmp_path: Path) -> None:
    names = {"architectures": ["Qwen3ForCausalLM"], "layer_types": [SLIDING, FULL], **USED}
    ropes = {SLIDING: {"rope_type": "default"}, FULL: {"rope_type": "linear", "factor": 2.0}}
    fields = {**NEEDED, **names, "rope_parameters": ropes, "rope_theta": 7e4}
    config = read(tmp_path, fields)
    sliding, full = (spec.rope for spec in config.attention)
    assert sliding == RotaryConfig(16, 7e4, 512)
    assert full == RotaryConfig(16, 7e4, 512, "linear", {"factor": 2.0})


@pytest.mark.parametrize("others", [{}, {FULL: None}, {FULL: "default"}], ids=str)
def test_a_layer_type_without_its_nested_rope_parameters_is_named(
    others: dict[str, Any], tmp_path: Path
) -> None:
    names = {"architectures": ["Qwen3ForCausalLM"], "layer_types": [SLIDING, FULL], **USED}
    ropes = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, **others}
    with pytest.raises(CheckpointError, match="rope_parameters has no object for 'full_attention'"):
        read(tmp_path, {**NEEDED, **names, "rope_parameters": ropes})


OLMO3_ROPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old": {"rope_scaling": YARN},
    "new": {"rope_parameters": {SLIDING: {"rope_type": "default"}, FULL: YARN}},
    "new without a part": {"rope_parameters": {FULL: YARN, SLIDING: None}},
    "both": {
        "rope_scaling": YARN,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 7e4},
            FULL: {"rope_type": "default", "rope_theta": 8e4},
        },
    },
}


@pytest.mark.parametrize("fields", OLMO3_ROPES.values(), ids=OLMO3_ROPES)
def test_ropes_of_olmo3_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    names = {"architectures": ["Olmo3ForCausalLM"], "layer_types": [SLIDING, FULL]}
    config = read(tmp_path, {**NEEDED, **names, **fields})
    expected = Olmo3Config(**json.loads(json.dumps({**NEEDED, **names, **fields}))).rope_parameters
    for layer_type, spec in zip([SLIDING, FULL], config.attention, strict=True):
        rope = spec.rope
        assert rope is not None
        read_as = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.scaling}
        assert read_as == expected[layer_type]


SCALING = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 7e5, "rope_scaling": SCALING},
        {
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 7e5},
                FULL: {**SCALING, "rope_theta": 7e5},
            }
        },
        {"rope_parameters": {**SCALING, "rope_theta": 7e5}},
    ],
    ids=["of the hub", "of transformers 5", "flat"],
)
def test_only_full_layers_of_olmo3_have_a_stretched_rope(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    """A theta beside them is that of all layers. transformers 5.24 forgets it for sliding ones.

    It writes no flat `rope_parameters`, and would read nothing of them: no theta and no scaling.
    """
    names = {"architectures": ["Olmo3ForCausalLM"], "layer_types": [SLIDING, FULL]}
    config = read(tmp_path, {**NEEDED, **names, **spelling})
    sliding, full = (spec.rope for spec in config.attention)
    assert sliding == RotaryConfig(16, 7e5, 512)
    scaling = {key: value for key, value in SCALING.items() if key != "rope_type"}
    assert full == RotaryConfig(16, 7e5, 512, "yarn", scaling)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([FULL, "linear_attention"], r"layer_types \['linear_attention'\] are not supported"),
        ([FULL], "layer_types names 1 layers, there are 2"),
    ],
)
def test_layer_types_that_are_not_known_are_named(
    types: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**NEEDED, "layer_types": types})


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    config = {key: value for key, value in NEEDED.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"config\.json: .*'?{name}'? is missing"):
        read(tmp_path, config)


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_field_of_experts_is_named(name: str, tmp_path: Path) -> None:
    config = {key: value for key, value in MOE.items() if key != name}
    assert read(tmp_path, config).num_experts == 0
    with pytest.raises(CheckpointError, match=rf"config\.json: .*'{name}' is missing"):
        read(tmp_path, {**config, "num_experts": 4})


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("SmolLM3ForCausalLM", "no_rope_layer_interval", 0),
        ("SmolLM3ForCausalLM", "no_rope_layer_interval", "4"),
        ("SmolLM3ForCausalLM", "no_rope_layers", [1]),
        ("SmolLM3ForCausalLM", "no_rope_layers", 1),
        ("Qwen2ForCausalLM", "max_window_layers", "1"),
    ],
)
def test_a_field_of_layers_that_cannot_be_is_named(
    architecture: str, name: str, value: Any, tmp_path: Path
) -> None:
    fields = {"sliding_window": 64, "use_sliding_window": True, name: value}
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} must be"):
        read(tmp_path, {**NEEDED, "architectures": [architecture], **fields})


def test_a_token_chooses_no_more_experts_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok must be at most 4, got 9"):
        read(tmp_path, {**MOE, "num_experts": 4, "num_experts_per_tok": 9})
    assert read(tmp_path, {**MOE, "num_experts": 2}).experts_per_token == 2


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 4), (4, 8), (4, 3)])
def test_each_kv_head_has_as_many_query_heads(
    num_heads: int, num_kv_heads: int, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    message = (
        rf"config\.json: num_attention_heads must be a multiple of num_key_value_heads "
        rf"\({num_kv_heads}\), got {num_heads}$"
    )
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**NEEDED, **heads})


@pytest.mark.parametrize(
    "value", [-1.0, -1e-6, float("inf"), float("nan"), 10**400, "1e-5", True], ids=excerpt
)
def test_a_norm_epsilon_that_cannot_be_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: rms_norm_eps must be .*, got"):
        read(tmp_path, {**NEEDED, "rms_norm_eps": value})
    assert read(tmp_path, {**NEEDED, "rms_norm_eps": 0}).norm_eps == 0.0


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", [[], 0, True, 1.5], ids=repr)
def test_a_dtype_that_is_no_text_is_named(name: str, value: Any, tmp_path: Path) -> None:
    message = rf"config\.json: {name} must be a text, got {re.escape(repr(value))}"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**NEEDED, name: value})


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("float16", "float16"),
        ("torch.bfloat16", "bfloat16"),
        *((value, None) for value in ("auto", "", "int32", "int4", "x", {"": "float16"}, None)),
    ],
    ids=repr,
)
def test_a_dtype_that_is_not_known_says_nothing(
    name: str, value: Any, dtype: str | None, tmp_path: Path
) -> None:
    assert read(tmp_path, {**NEEDED, name: value}).stored_dtype == dtype


def test_the_newer_name_of_the_dtype_counts(tmp_path: Path) -> None:
    both = {"dtype": "bfloat16", "torch_dtype": "float16"}
    assert read(tmp_path, {**NEEDED, **both}).stored_dtype == "bfloat16"
    assert read(tmp_path, {**NEEDED, **both, "dtype": None}).stored_dtype == "float16"


@pytest.mark.parametrize("value", [[], {}, 0], ids=repr)
def test_a_model_type_that_is_no_text_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: model_type must be a text, got"):
        read(tmp_path, {**NEEDED, "model_type": value})


@pytest.mark.parametrize("value", [[], None, {}], ids=str)
def test_a_field_without_an_architecture_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: .*architectures"):
        read(tmp_path, {**NEEDED, "architectures": value})


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"]
)
@pytest.mark.parametrize("value", ["64", None, 0, 1.5], ids=repr)
def test_a_size_that_is_no_positive_integer_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{name}"):
        read(tmp_path, {**NEEDED, name: value})


@pytest.mark.parametrize(
    "place",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": None}},
    ],
)
def test_a_partial_rotary_embedding_is_refused(place: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"config\.json: partial_rotary_factor is not supported"
    ):
        read(tmp_path, {**NEEDED, **place})


@pytest.mark.parametrize("factor", [None, 1, 1.0])
def test_a_whole_rotary_embedding_is_not_refused(factor: float | None, tmp_path: Path) -> None:
    plain = RotaryConfig(head_dim=16, theta=10000.0, max_position=512)
    for fields in (
        {"partial_rotary_factor": factor},
        {"rope_parameters": {"partial_rotary_factor": factor}},
    ):
        assert read(tmp_path, {**NEEDED, **fields}).attention[0].rope == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": ["silu"]}, r"hidden_act must be a text, got \['silu'\]"),
        ({"hidden_act": 0}, "hidden_act must be a text, got 0"),
        ({"layer_types": 5}, "layer_types must be a list of texts, got 5"),
        ({"layer_types": [[1]]}, r"layer_types must be a list of texts, got \[\[1\]\]"),
        ({"architectures": [[1]]}, r"architectures must be a list of texts, got \[\[1\]\]"),
    ],
    ids=str,
)
def test_a_field_that_is_no_text_is_named(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read(tmp_path, {**NEEDED, **fields})


@pytest.mark.parametrize(
    "name",
    [
        "num_key_value_heads",
        "num_experts",
        "num_local_experts",
        "head_dim",
        "mlp_only_layers",
        "use_sliding_window",
        "sliding_window",
    ],
)
@pytest.mark.parametrize("value", ["", [], {}, False], ids=repr)
def test_what_is_empty_but_of_another_type_is_not_taken_for_absent(
    name: str, value: Any, tmp_path: Path
) -> None:
    if (name, value) in MEANINGFUL:
        pytest.skip("it is of the right type")
    fields = {**MOE, "num_experts": 4, "sliding_window": 64, name: value}
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} must be"):
        read(tmp_path, fields)


@pytest.mark.parametrize("name", ["num_key_value_heads", "num_experts", "head_dim"])
def test_null_stands_for_what_is_not_there(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, {**NEEDED, name: None}) == read(tmp_path, NEEDED)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_model_may_have_0_experts(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, {**NEEDED, name: 0}) == read(tmp_path, NEEDED)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("num_key_value_heads", "a positive integer"),
        ("head_dim", r"an even integer in \[2, 65536\]"),
    ],
)
def test_a_model_has_no_0_heads_and_no_heads_of_width_0(
    name: str, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} must be {kind}, got 0$"):
        read(tmp_path, {**NEEDED, name: 0})


@pytest.mark.parametrize("fields", [{"head_dim": 3}, {"hidden_size": 12}], ids=str)
def test_the_halves_of_a_head_are_rotated_so_its_width_is_even(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: head_dim must be .*even.*, got 3$"):
        read(tmp_path, {**NEEDED, **fields})


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [None, {}, [], False], ids=repr)
def test_an_empty_quantization_is_none(name: str, value: Any, tmp_path: Path) -> None:
    assert read(tmp_path, {**NEEDED, name: value}).quantization is None


@pytest.mark.parametrize("arch", ["Mistral", "New"])
def test_0_stands_for_no_use_of_the_window(arch: str, tmp_path: Path) -> None:
    fields = {"architectures": [f"{arch}ForCausalLM"], "sliding_window": 64}
    config = read(tmp_path, {**NEEDED, **fields, "use_sliding_window": 0})
    assert [spec.window for spec in config.attention] == [None] * 2


def test_an_activation_of_null_is_that_of_a_silent_file(tmp_path: Path) -> None:
    assert read(tmp_path, {**NEEDED, "hidden_act": None}).activation == "silu"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"vocab_size": 1,}', b"\xff\xfe\x00", b"[1, 2]", b"null"], ids=repr
)
def test_a_file_that_holds_no_json_object_is_named(
    name: str, content: bytes, tmp_path: Path
) -> None:
    read(tmp_path, NEEDED, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"/{name} (cannot be read|holds no JSON object)"):
        ModelConfig.from_folder(tmp_path)


def test_a_config_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)


def test_an_unknown_architecture_is_named_with_those_there_are() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: architectures: unknown architecture 'BertModel'; there is .*Llama",
    ):
        get_model_class("BertModel")
