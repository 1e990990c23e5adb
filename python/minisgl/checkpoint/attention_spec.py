"""The attention of each layer, as a model's config.json describes it.

The rules of the architectures are those of transformers: which layers have a sliding window, and
which rotation a layer has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minisgl.utils.excerpts import excerpt

_MAX_HEAD_DIM = 1 << 16
_MAX_FACTOR = 1 << 20  # by which a context is lengthened, and of all other parameters
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_NOT_SCALING = ("rope_type", "type", "rope_theta", _PARTIAL)
_STRETCHING = ("linear", "llama3", "yarn")
ROPE_TYPES = ("default", *_STRETCHING)  # those of checkpoints
DIVIDED = "divided"  # what the config of a GGUF file says: each frequency has a divisor
_POSITIVE = ("factor", "high_freq_factor", "attention_factor")
# 0 stands for what is not there, as in transformers; in `low_freq_factor` it is a bound.
_NOT_NEGATIVE = ("low_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_LENGTHENING = ("linear", "yarn")  # llama3 has the lengthened context in max_position_embeddings


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """A rotary position embedding.

    Attributes:
        max_position: max_position_embeddings of the checkpoint.
        kind: one of `ROPE_TYPES`, or `DIVIDED`; others have no rotation in `layers/rotary.py`.
        scaling: the checkpoint's further parameters, by their Hugging Face names.
    """

    head_dim: int
    theta: float
    max_position: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def original_context(self) -> int:
        """Positions of the training before the rotation was stretched."""
        original = self.scaling.get(_ORIGINAL)
        if original is None:
            return self.max_position
        if type(original) is not int or original < 1:
            raise ValueError(f"{_ORIGINAL} must be a positive integer, got {excerpt(original)}")
        return original

    @property
    def context_length(self) -> int:
        """Positions that the rotation is made for.

        max_position_embeddings is the original context in some checkpoints, and the lengthened one
        in others, which then name the original.
        """
        if self.kind not in _LENGTHENING:
            return self.max_position
        factor: Any = self.scaling.get("factor")
        _check_number(factor, f"the factor of the rope type {excerpt(self.kind)}")
        return max(self.max_position, int(self.original_context * factor))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer.

    No architecture here has a soft cap yet, so no field of config.json sets it.

    Attributes:
        scale: the factor of the scores.
        window: how many positions a query sees, its own and those just before it; None for all.
        softcap: scores x become softcap * tanh(x / softcap); None leaves them.
        rope: the rotation of queries and keys; None leaves them as projected.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    rope: RotaryConfig | None = None


def attention_specs(hf: dict[str, Any], architecture: str) -> tuple[AttentionSpec, ...]:
    """The attention of every layer.

    Args:
        hf: config.json, with the defaults of its architecture filled in.

    Raises:
        KeyError, ValueError: a field is missing, or its value is not supported.
    """
    window = _window(hf, architecture)
    layer_types = _layer_types(hf, architecture)
    _check_listed_layers(hf, architecture, window)
    has_rope = _ROTATED_LAYERS.get(architecture, _every_layer)
    return tuple(
        AttentionSpec(
            scale=1.0 / math.sqrt(head_dim(hf)),
            window=window if layer_type == _SLIDING else None,
            rope=_rope(hf, architecture, layer_type) if has_rope(hf, layer) else None,
        )
        for layer, layer_type in enumerate(layer_types)
    )


def head_dim(hf: dict[str, Any]) -> int:
    """The width of a head; null stands for the model's width divided by the number of heads.

    It is even, because a rotation is of pairs.
    """
    width = hf.get("head_dim")
    if width is None:
        width = hf["hidden_size"] // hf["num_attention_heads"]
    if type(width) is not int or not 0 < width <= _MAX_HEAD_DIM or width % 2 == 1:
        raise ValueError(
            f"head_dim must be an even integer in [2, {_MAX_HEAD_DIM}], got {excerpt(width)}"
        )
    return width


def _window(hf: dict[str, Any], architecture: str) -> int | None:
    """The width of the sliding windows; None if no layer has one.

    A known architecture has one only if `use_sliding_window` says so, in the file or by default.
    """
    window = hf.get("sliding_window")
    uses_window = hf.get("use_sliding_window")
    if type(uses_window) is int and uses_window == 0:
        uses_window = False
    if not isinstance(uses_window, bool | None):
        raise ValueError(f"use_sliding_window must be true or false, got {excerpt(uses_window)}")
    if window is not None and type(window) is not int:
        raise ValueError(f"sliding_window must be a positive integer, got {excerpt(window)}")
    if window is None or uses_window is False:
        return None
    if architecture not in _SLIDING_RULES:
        raise ValueError(f"sliding_window is not supported for {architecture}")
    if not uses_window:
        return None
    if window < 1:
        raise ValueError(f"sliding_window must be a positive integer, got {excerpt(window)}")
    return window


def _layer_types(hf: dict[str, Any], architecture: str) -> list[str]:
    """The type of each layer: whether it has the window, if there is one."""
    num_layers = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        return _ruled_layer_types(hf, architecture)
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types must be a list of texts, got {excerpt(types)}")
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown:
        raise ValueError(f"layer_types {unknown} are not supported: {_FULL}, {_SLIDING}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, there are {num_layers}")
    return list(types)


def _ruled_layer_types(hf: dict[str, Any], architecture: str) -> list[str]:
    slides = _SLIDING_RULES.get(architecture, _no_layer)
    return [_SLIDING if slides(hf, layer) else _FULL for layer in range(hf["num_hidden_layers"])]


def _check_listed_layers(hf: dict[str, Any], architecture: str, window: int | None) -> None:
    """Refuse a file that lists sliding layers without a window, or other layers than slide."""
    listed = hf.get("layer_types") or []
    # In transformers 5.23 Qwen fails on such a file, Llama has full attention, and SmolLM3 slides.
    if window is None and _SLIDING in listed:
        raise ValueError(
            f"layer_types lists {_SLIDING}, but no window is used: sliding_window is "
            f"{excerpt(hf.get('sliding_window'))}, "
            f"use_sliding_window {excerpt(hf.get('use_sliding_window'))}"
        )
    if window is None or not listed or architecture not in _UNLISTED:
        return
    ruled = _ruled_layer_types(hf, architecture)
    if listed != ruled:
        raise ValueError(
            f"layer_types is not supported for {architecture}, whose layers are all {ruled[0]}; "
            f"it is {excerpt(listed)}"
        )


def _has_rope(hf: dict[str, Any], layer: int) -> bool:
    """Despite its name, `no_rope_layers` has a 1 for each layer with a rotation."""
    listed = hf.get("no_rope_layers")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < hf["num_hidden_layers"]:
            raise ValueError(
                f"no_rope_layers must be a list with a number for each of "
                f"{hf['num_hidden_layers']} layers, got {excerpt(listed)}"
            )
        return bool(listed[layer])
    interval = hf.get("no_rope_layer_interval")
    if interval is None:
        return True
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f"no_rope_layer_interval must be a positive integer, got {excerpt(interval)}"
        )
    return (layer + 1) % interval != 0


def _rope(hf: dict[str, Any], architecture: str, layer_type: str) -> RotaryConfig:
    rope_parameters = _ROPE_RULES.get(architecture, _rope_parameters)
    rope = rope_parameters(hf, layer_type)
    _check_whole_rotation(hf, rope)
    theta = _first_given(rope.get("rope_theta"), hf.get("rope_theta"), 10000.0)
    if type(theta) not in (int, float) or not 0 < theta <= sys.float_info.max:
        raise ValueError(f"rope_theta must be a positive number, got {excerpt(theta)}")
    kind = _first_given(rope.get("rope_type"), rope.get("type"), "default")
    if not isinstance(kind, str):
        raise ValueError(f"rope_type must be a text, got {excerpt(kind)}")
    scaling = {name: rope[name] for name in rope if name not in _NOT_SCALING}
    _check_scaling(kind, scaling)
    return RotaryConfig(
        head_dim=head_dim(hf),
        theta=float(theta),
        max_position=hf["max_position_embeddings"],
        kind=kind,
        scaling=scaling,
    )


def _first_given(*values: Any) -> Any:
    """The first value that is not null."""
    return next(value for value in values if value is not None)


def _check_scaling(kind: str, scaling: dict[str, Any]) -> None:
    """Refuse numbers that make no sense for a model; transformers warns about some of them.

    `layers/rotary.py` refuses a kind whose numbers are missing.
    """
    if kind not in _STRETCHING:
        return
    for name, value in scaling.items():
        if value is not None and name in _POSITIVE + _NOT_NEGATIVE:
            may_be_0 = name in _NOT_NEGATIVE
            _check_number(value, f"the {name} of the rope type {excerpt(kind)}", may_be_0=may_be_0)
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):  # to transformers a null is false, and not absent
        raise ValueError(
            f"the truncate of the rope type {excerpt(kind)} must be true or false, "
            f"got {excerpt(truncate)}"
        )
    low = scaling.get("low_freq_factor")
    high = scaling.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"the low_freq_factor of the rope type {excerpt(kind)} must be below its "
            f"high_freq_factor {excerpt(high)}, got {excerpt(low)}"
        )


def _check_number(value: Any, name: str, *, may_be_0: bool = False) -> None:
    is_number = type(value) in (int, float)
    is_0 = may_be_0 and value == 0
    if not is_number or not (is_0 or 0 < value <= _MAX_FACTOR):
        bound = "[" if may_be_0 else "("
        raise ValueError(f"{name} must be in {bound}0, {_MAX_FACTOR}], got {excerpt(value)}")


def _rope_parameters(hf: dict[str, Any], layer_type: str) -> dict[str, Any]:
    """The rope parameters of a type of layer, where and as transformers 5 finds them."""
    # Not merged: parameters of two kinds would make a third one.
    rope = _object(hf, "rope_scaling") or _object(hf, "rope_parameters")
    if _is_nested(rope):
        if not isinstance(rope.get(layer_type), dict):
            raise ValueError(
                f"rope_parameters has no object for {excerpt(layer_type)}, but for others"
            )
        return dict(rope[layer_type])
    original = hf.get(_ORIGINAL)
    return rope if original is None else {**rope, _ORIGINAL: original}


def _olmo3_rope_parameters(hf: dict[str, Any], layer_type: str) -> dict[str, Any]:
    """OLMo 3 stretches the rotation of full layers only; its `rope_scaling` is about these.

    Where `rope_parameters` are not nested, all layers have their theta, and full layers the rest.
    """
    old = _object(hf, "rope_scaling")
    new = _object(hf, "rope_parameters")
    if layer_type == _SLIDING:
        return _object(new, _SLIDING) if _is_nested(new) else {"rope_theta": new.get("rope_theta")}
    return {**(_object(new, _FULL) if _is_nested(new) else new), **old}


def _is_nested(rope: dict[str, Any]) -> bool:
    """Whether there are parameters for each type of layer."""
    return _FULL in rope or _SLIDING in rope


def _object(hf: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object; an empty one if the field is null or absent."""
    value = hf.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {excerpt(value)}")
    return dict(value or {})


def _check_whole_rotation(hf: dict[str, Any], rope: dict[str, Any]) -> None:
    """Refuse heads that are rotated in part. The factor beside the parameters counts last."""
    factor = rope.get(_PARTIAL)
    if factor is None:
        factor = hf.get(_PARTIAL)
    if factor not in (None, 1):
        raise ValueError(f"{_PARTIAL} is not supported, it is {excerpt(factor)}")


def _no_layer(_hf: dict[str, Any], _layer: int) -> bool:
    return False


def _every_layer(_hf: dict[str, Any], _layer: int) -> bool:
    return True


def _three_of_four(_hf: dict[str, Any], layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _last_layers(hf: dict[str, Any], layer: int) -> bool:
    first = hf.get("max_window_layers", 28)
    if type(first) is not int:
        raise ValueError(f"max_window_layers must be an integer, got {excerpt(first)}")
    return layer >= first


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

# Architectures whose models, in transformers, do not look at `layer_types`.
_UNLISTED = ("LlamaForCausalLM", "Olmo2ForCausalLM", "Qwen3MoeForCausalLM")

# Which layers have a rotation, where not all have one.
_ROTATED_LAYERS: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "SmolLM3ForCausalLM": _has_rope,
}

# Rope parameters of a type of layer, where an architecture has rules of its own.
_ROPE_RULES: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "Olmo3ForCausalLM": _olmo3_rope_parameters,
}
