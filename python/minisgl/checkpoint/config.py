"""The JSON files of a model folder, in one common form.

Over the years checkpoints have used different names for the same field, such as `rope_scaling` with
`type`, `rope_scaling` with `rope_type`, and `rope_parameters`. Only this module,
`attention_spec.py` and `quantization.py` see the JSON.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.checkpoint.attention_spec import (
    DIVIDED,
    ROPE_TYPES,
    AttentionSpec,
    attention_specs,
    head_dim,
)
from minisgl.checkpoint.files import GGUF_NAME, MAX_CONFIG_BYTES, read_json
from minisgl.checkpoint.quantization import Quantization, read_quantization, refuse_modelopt
from minisgl.errors import CheckpointError
from minisgl.utils.excerpts import excerpt

# transformers' defaults for fields that a config.json lacks, if architectures differ in them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"use_sliding_window": True, "sliding_window": 4096},
    "Olmo3ForCausalLM": {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
    },
    "SmolLM3ForCausalLM": {
        "no_rope_layer_interval": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
}


# What a file may say of its plain weights. transformers takes these names of torch.
_DTYPES = (
    *("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("float", "half", "double", "int8", "uint8"),
)
# What else of generation_config.json would choose other tokens, or end an answer: the numbers with
# which a field changes nothing.
_NOT_FOLLOWED: dict[str, tuple[float, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "top_h": (1,),
    "typical_p": (1,),
    "watermarking_config": (),
}
_MAX_LAYERS = 4096
_MAX_SIZE = 1 << 28  # of any other number: the largest are vocabularies and widths
# Positions beyond it are equal to others in float32, of which angles are made. The longest context
# of a model is 10 * 2**20.
_MAX_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model.

    Attributes:
        max_position: the context length, in tokens.
        attention: the attention of each layer.
        num_experts: 0 for a dense model; the other fields about experts are then meaningless.
        dense_layers: layers that have a plain MLP; in a dense model all layers.
        stored_dtype: of plain weights, such as float16; None if the file does not say it.
        quantization: how weights are stored; None if all are plain.
        eos_ids: tokens that end an answer: of generation_config.json and config.json together.
        sampling_defaults: temperature, top_k, top_p, min_p and repetition_penalty as
            generation_config.json recommends them.
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
    attention: tuple[AttentionSpec, ...]
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_experts: bool = False
    dense_layers: frozenset[int] = frozenset()
    stored_dtype: str | None = None
    quantization: Quantization | None = None
    eos_ids: frozenset[int] = frozenset()
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and, if there is one, generation_config.json.

        Raises:
            CheckpointError: a file or a required field is missing or invalid, or weights are
                quantized in a way that is not supported.
        """
        hf = read_json(folder / "config.json", MAX_CONFIG_BYTES)
        path = folder / "generation_config.json"
        generation = read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}
        try:
            _ids(generation.get("eos_token_id"))
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        refuse_modelopt(folder)
        try:
            config = cls.from_json(hf, generation)
            if not (folder / GGUF_NAME).exists():
                _refuse_divided(config.attention)
        except ValueError as error:
            raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
        return config

    @classmethod
    def from_json(cls, hf: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """Read the contents of config.json and generation_config.json.

        Raises:
            ValueError: a required field is missing or invalid, or weights are quantized in a way
                that is not supported.
        """
        try:
            return cls._from_json(hf, generation or {})
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(_explain(error)) from error

    @classmethod
    def _from_json(cls, hf: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
        architecture = _architecture(hf)
        _check_model_type(hf)
        if hf.get("rope_theta") is None:  # a null of another field may mean that there is none
            hf.pop("rope_theta", None)
        hf = {**_DEFAULTS.get(architecture, {}), **hf}
        width = _size(hf, "hidden_size")
        num_layers = _size(hf, "num_hidden_layers")
        num_heads = _size(hf, "num_attention_heads")
        num_local_experts = _num_experts(hf, "num_local_experts")
        num_experts = _num_experts(hf, "num_experts") or num_local_experts
        attention = attention_specs(hf, architecture)
        return cls(
            architecture=architecture,
            vocab_size=_size(hf, "vocab_size"),
            width=width,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(hf, num_heads),
            head_dim=head_dim(hf),
            mlp_width=_size(hf, "intermediate_size"),
            activation=_activation(hf),
            norm_eps=_norm_eps(hf),
            max_position=_context_length(hf, attention),
            attention=attention,
            tied_embeddings=_flag(hf, "tie_word_embeddings"),
            attention_bias=_flag(hf, "attention_bias"),
            mlp_bias=_flag(hf, "mlp_bias"),
            num_experts=num_experts,
            experts_per_token=_experts_per_token(hf, num_experts),
            expert_width=_size(hf, "moe_intermediate_size") if num_experts else 0,
            normalize_experts=_flag(hf, "norm_topk_prob"),
            dense_layers=_dense_layers(hf, num_experts),
            stored_dtype=_stored_dtype(hf),
            quantization=read_quantization(hf),
            eos_ids=_ids(hf.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
            sampling_defaults=_sampling_defaults(generation),
        )


def _refuse_divided(attention: tuple[AttentionSpec, ...]) -> None:
    """Refuse what only `gguf_folder.py` writes, which has checked the divisors."""
    if any(spec.rope is not None and spec.rope.kind == DIVIDED for spec in attention):
        raise ValueError(
            f"rope_type {DIVIDED!r} is not supported; there is {', '.join(ROPE_TYPES)}"
        )


def foreign_eos_ids(folder: Path, vocab_size: int) -> dict[Path, list[int]]:
    """By file, the ids that it names as ends of sequence but that are no tokens of the model."""
    foreign: dict[Path, list[int]] = {}
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.exists():
            ids = _ids(read_json(path, MAX_CONFIG_BYTES).get("eos_token_id"))
            foreign[path] = sorted(token for token in ids if not 0 <= token < vocab_size)
    return {path: ids for path, ids in foreign.items() if ids}


def recommendations_not_followed(folder: Path) -> list[str]:
    """Fields of generation_config.json that would change answers, but are not supported here."""
    path = folder / "generation_config.json"
    generation = read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}
    return [
        name
        for name, neutral in _NOT_FOLLOWED.items()
        if generation.get(name) not in (None, [], {}, *neutral)
    ]


def _architecture(hf: dict[str, Any]) -> str:
    names = hf["architectures"]
    if not isinstance(names, list) or not names:
        raise ValueError(f"architectures must name one, got {excerpt(names)}")
    if not isinstance(names[0], str):
        raise ValueError(f"architectures must be a list of texts, got {excerpt(names)}")
    return names[0]


def _activation(hf: dict[str, Any]) -> str:
    name = hf.get("hidden_act")
    if name is None:
        return "silu"
    if not isinstance(name, str):
        raise ValueError(f"hidden_act must be a text, got {excerpt(name)}")
    return name


def _size(hf: dict[str, Any], name: str) -> int:
    most = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
    return _check_size(name, hf[name], most)


def _check_size(name: str, size: Any, most: int) -> int:
    if type(size) is not int or size < 1:
        raise ValueError(f"{name} must be a positive integer, got {excerpt(size)}")
    if size > most:
        raise ValueError(f"{name} must be at most {most}, got {excerpt(size)}")
    return size


def _num_experts(hf: dict[str, Any], name: str) -> int:
    """A number of experts; 0 also if the field is null or absent."""
    value = hf.get(name)
    is_0 = type(value) is int and value == 0
    return 0 if value is None or is_0 else _size(hf, name)


def _experts_per_token(hf: dict[str, Any], num_experts: int) -> int:
    if num_experts == 0:
        return 0
    return _check_size("num_experts_per_tok", hf["num_experts_per_tok"], num_experts)


def _num_kv_heads(hf: dict[str, Any], num_heads: int) -> int:
    is_given = hf.get("num_key_value_heads") is not None
    num_kv_heads = _size(hf, "num_key_value_heads") if is_given else num_heads
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads ({num_kv_heads}), "
            f"got {num_heads}"
        )
    return num_kv_heads


def _norm_eps(hf: dict[str, Any]) -> float:
    eps = hf["rms_norm_eps"]
    is_number = type(eps) in (int, float)
    if not is_number or not 0 <= eps <= sys.float_info.max:
        raise ValueError(f"rms_norm_eps must be a finite number of at least 0, got {excerpt(eps)}")
    return float(eps)


def _flag(hf: dict[str, Any], name: str) -> bool:
    value = hf.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {excerpt(value)}")
    return value


def _explain(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def _stored_dtype(hf: dict[str, Any]) -> str | None:
    """The dtype of plain weights. Only a message shows it, so an unknown name does no harm.

    A model of several parts has an object here.
    """
    stored = None
    for name in ("torch_dtype", "dtype"):
        value = hf.get(name)
        if not isinstance(value, str | dict | None):
            raise ValueError(f"{name} must be a text, got {excerpt(value)}")
        stored = stored if value is None else value
    known = stored.removeprefix("torch.") if isinstance(stored, str) else ""
    return known if known in _DTYPES else None


def _check_model_type(hf: dict[str, Any]) -> None:
    """Refuse a model_type that is no string: transformers' tokenizers would fail on it."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str | None):
        raise ValueError(f"model_type must be a text, got {excerpt(model_type)}")


def _context_length(hf: dict[str, Any], attention: tuple[AttentionSpec, ...]) -> int:
    """max_position_embeddings, or more if the rotation of some layers is stretched beyond it."""
    longest = _size(hf, "max_position_embeddings")
    for spec in attention:
        if spec.rope is not None:
            longest = max(longest, spec.rope.context_length)
    return _check_size("the context length", longest, _MAX_CONTEXT)


def _dense_layers(hf: dict[str, Any], num_experts: int) -> frozenset[int]:
    layers = range(hf["num_hidden_layers"])
    if num_experts == 0:
        return frozenset(layers)
    step = _check_size("decoder_sparse_step", hf.get("decoder_sparse_step", 1), _MAX_LAYERS)
    named = hf.get("mlp_only_layers")
    if named is None:
        named = []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ValueError(f"mlp_only_layers must be a list of layers, got {excerpt(named)}")
    skipped = (layer for layer in layers if (layer + 1) % step)
    return frozenset(named).intersection(layers).union(skipped)


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {excerpt(value)}")
    return frozenset(ids)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The recommended values that differ from plain sampling.

    `do_sample: false` is the default where a file says nothing, and so is not a recommendation.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    neutral = {"top_k": 0, "repetition_penalty": 1}
    return {name: value for name, value in given.items() if neutral.get(name) != value}
