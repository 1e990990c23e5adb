"""What the attention of each layer is, as a model's config.json says it.

The rules of the architectures are those of transformers: which layers have a sliding window, and
which rotation a layer has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_MAX_HEAD_DIM = 1 << 16
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_NOT_SCALING = ("rope_type", "type", "rope_theta", _FULL, _SLIDING)


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """A rotary position embedding.

    Attributes:
        kind: one of those in `layers/rotary.py`.
        scaling: the checkpoint's further parameters, by their Hugging Face names.
    """

    head_dim: int
    theta: float
    max_position: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer.

    No architecture here has a soft cap or sinks yet, so no field of config.json sets these two.

    Attributes:
        scale: what scores are multiplied by.
        window: how many positions a query sees, its own and those just before it; None for all.
        softcap: scores x become softcap * tanh(x / softcap); None leaves them.
        has_sinks: whether each head has a learned score beside those of the keys.
        rope: the rotation of queries and keys; None leaves them as projected.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    rope: RotaryConfig | None = None


def attention_specs(hf: dict[str, Any], architecture: str) -> tuple[AttentionSpec, ...]:
    """The attention of every layer.

    Args:
        hf: config.json, with the defaults of its architecture filled in.

    Raises:
        KeyError, ValueError: a field is missing, or its value is not supported.
    """
    window = _window(hf, architecture)
    return tuple(
        AttentionSpec(
            scale=1.0 / math.sqrt(head_dim(hf)),
            window=window if layer_type == _SLIDING else None,
            rope=_rope(hf, architecture, layer_type) if _has_rope(hf, layer) else None,
        )
        for layer, layer_type in enumerate(_layer_types(hf, architecture))
    )


def head_dim(hf: dict[str, Any]) -> int:
    """The width of a head."""
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    if type(width) is not int or not 0 < width <= _MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be an integer in [1, {_MAX_HEAD_DIM}], got {width!r}")
    return width


def _window(hf: dict[str, Any], architecture: str) -> int | None:
    """The width of the sliding windows; None if no layer has one.

    A known architecture has one only if `use_sliding_window` says so, in the file or by default.
    """
    window = hf.get("sliding_window")
    uses_window = hf.get("use_sliding_window")
    if window is None or uses_window is False:
        return None
    if architecture not in _SLIDING_RULES:
        raise ValueError(f"sliding_window is not supported for {architecture}")
    if not uses_window:
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window must be a positive integer, got {window!r}")
    return window


def _layer_types(hf: dict[str, Any], architecture: str) -> list[str]:
    """For each layer, whether it has the window, if there is one."""
    num_layers = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        slides = _SLIDING_RULES.get(architecture, _no_layer)
        return [_SLIDING if slides(hf, layer) else _FULL for layer in range(num_layers)]
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown:
        raise ValueError(f"layer_types {unknown} are not supported: {_FULL}, {_SLIDING}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, there are {num_layers}")
    return list(types)


def _has_rope(hf: dict[str, Any], layer: int) -> bool:
    """Despite its name, `no_rope_layers` has a 1 for each layer with a rotation."""
    if hf.get("no_rope_layers") is not None:
        return bool(hf["no_rope_layers"][layer])
    interval = hf.get("no_rope_layer_interval")
    return interval is None or (layer + 1) % interval != 0


def _rope(hf: dict[str, Any], architecture: str, layer_type: str) -> RotaryConfig:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    if rope.get(layer_type) is not None:  # OLMo-3 has parameters for each type of layer
        rope = rope[layer_type]
    elif architecture == "Olmo3ForCausalLM" and layer_type == _SLIDING:  # never stretched
        rope = {"rope_theta": rope.get("rope_theta")}
    if hf.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) not in (1.0, None):
        raise ValueError("partial_rotary_factor is not supported")
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
    return RotaryConfig(
        head_dim=head_dim(hf),
        theta=float(theta),
        max_position=hf["max_position_embeddings"],
        kind=str(rope.get("rope_type") or rope.get("type") or "default"),
        scaling={name: rope[name] for name in rope if name not in _NOT_SCALING},
    )


def _no_layer(_hf: dict[str, Any], _layer: int) -> bool:
    return False


def _every_layer(_hf: dict[str, Any], _layer: int) -> bool:
    return True


def _three_of_four(_hf: dict[str, Any], layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _last_layers(hf: dict[str, Any], layer: int) -> bool:
    return bool(layer >= hf.get("max_window_layers", 28))


def _layers_without_rope(hf: dict[str, Any], layer: int) -> bool:
    return not _has_rope(hf, layer)


# Whether a layer has the window, where config.json does not list the types of layers. A model with
# a window is refused if its architecture is not here.
_SLIDING_RULES: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "LlamaForCausalLM": _no_layer,
    "MistralForCausalLM": _every_layer,
    "Olmo2ForCausalLM": _no_layer,
    "Olmo3ForCausalLM": _three_of_four,
    "Qwen2ForCausalLM": _last_layers,
    "Qwen3ForCausalLM": _last_layers,
    "Qwen3MoeForCausalLM": _every_layer,
    "SmolLM3ForCausalLM": _layers_without_rope,
}
