"""What a model folder's JSON files say, in one spelling.

Checkpoints of several years name the same things differently (`rope_scaling` with `type`, `rope_scaling` with
`rope_type`, `rope_parameters`). Here they meet; nothing behind this file sees the JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.checkpoint.quantization import Quantization, read_quantization
from minisgl.errors import CheckpointError

_ROPE_PARAMETERS_OF_THEIR_OWN = ("rope_type", "type", "rope_theta")


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How a model's positions turn.

    Attributes:
        kind: one of those in `layers/rotary.py`.
        scaling: the checkpoint's further parameters, by their Hugging Face names.
    """

    head_dim: int
    theta: float
    max_position: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model.

    Attributes:
        sliding_window: positions that attention sees at most; None for all.
        num_experts: 0 for a dense model; the following fields are then meaningless.
        dense_layers: layers of an expert model that have a plain MLP.
        quantization: how weights are stored; None if all are plain.
        eos_ids: tokens that end an answer: of generation_config.json and config.json together.
        sampling_defaults: temperature, top_k, top_p, min_p as generation_config.json recommends.
    """

    architecture: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    activation: str
    norm_eps: float
    max_position: int
    rotary: RotaryConfig
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_experts: bool = False
    dense_layers: frozenset[int] = frozenset()
    quantization: Quantization | None = None
    eos_ids: frozenset[int] = frozenset()
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and, if there is one, generation_config.json.

        Raises:
            CheckpointError: a file is missing or damaged, or a needed field is.
        """
        hf = _read_json(folder / "config.json")
        path = folder / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        try:
            return cls._from_json(hf, generation)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{folder / 'config.json'}: {_explain(error)}") from error

    @classmethod
    def _from_json(cls, hf: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
        num_heads = _size(hf, "num_attention_heads")
        head_dim = hf.get("head_dim") or _size(hf, "hidden_size") // num_heads
        max_position = hf["max_position_embeddings"]
        return cls(
            architecture=_architecture(hf),
            vocab_size=_size(hf, "vocab_size"),
            width=_size(hf, "hidden_size"),
            num_layers=_size(hf, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            mlp_width=_size(hf, "intermediate_size"),
            activation=hf.get("hidden_act", "silu"),
            norm_eps=hf["rms_norm_eps"],
            max_position=max_position,
            rotary=_rotary(hf, head_dim, max_position),
            tied_embeddings=hf.get("tie_word_embeddings", False),
            attention_bias=hf.get("attention_bias", False),
            mlp_bias=hf.get("mlp_bias", False),
            sliding_window=_sliding_window(hf),
            num_experts=hf.get("num_experts") or hf.get("num_local_experts") or 0,
            experts_per_token=hf.get("num_experts_per_tok", 0),
            expert_width=hf.get("moe_intermediate_size", 0),
            normalize_experts=hf.get("norm_topk_prob", False),
            dense_layers=_dense_layers(hf),
            quantization=read_quantization(hf),
            eos_ids=_ids(hf.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
            sampling_defaults=_sampling_defaults(generation),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _architecture(hf: dict[str, Any]) -> str:
    names = hf["architectures"]
    if not isinstance(names, list) or not names:
        raise ValueError(f"architectures must name one, got {names!r}")
    return str(names[0])


def _size(hf: dict[str, Any], name: str) -> int:
    size = hf[name]
    if type(size) is not int or size < 1:
        raise ValueError(f"{name} must be a positive integer, got {size!r}")
    return size


def _explain(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def _rotary(hf: dict[str, Any], head_dim: int, max_position: int) -> RotaryConfig:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    if hf.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) not in (1.0, None):
        raise ValueError("partial_rotary_factor is not supported")
    return RotaryConfig(
        head_dim=head_dim,
        theta=rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
        max_position=max_position,
        kind=rope.get("rope_type") or rope.get("type") or "default",
        scaling={key: rope[key] for key in rope if key not in _ROPE_PARAMETERS_OF_THEIR_OWN},
    )


def _sliding_window(hf: dict[str, Any]) -> int | None:
    """The window, if any layer uses it."""
    if not hf.get("use_sliding_window", True):
        return None
    if "layer_types" in hf and "sliding_attention" not in hf["layer_types"]:
        return None
    return hf.get("sliding_window")


def _dense_layers(hf: dict[str, Any]) -> frozenset[int]:
    step = hf.get("decoder_sparse_step", 1)
    by_step = {layer for layer in range(hf["num_hidden_layers"]) if (layer + 1) % step}
    return frozenset(by_step | set(hf.get("mlp_only_layers") or []))


def _ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset(value if isinstance(value, list) else [] if value is None else [value])


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """What differs from plain sampling; `do_sample: false`, the files' silent default, is not taken as advice."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    neutral = {"top_k": 0, "repetition_penalty": 1}
    return {name: value for name, value in given.items() if neutral.get(name) != value}
