"""How a checkpoint's weights are quantized, as its config.json describes it. Without torch.

Two methods are known: `fp8`, as Qwen and DeepSeek publish it, and `compressed-tensors`
(https://github.com/vllm-project/compressed-tensors). Any other method is refused by name, because a
model whose weights are read without their scales writes nonsense.

Only the storage of weights matters here. Schemes for activations are ignored: products are computed
in the compute dtype. `models/quantized.py` reads the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.checkpoint.files import MAX_CONFIG_BYTES, read_json
from minisgl.errors import CheckpointError
from minisgl.utils.excerpts import excerpt

_FIELD = "quantization_config"
_OLDER_FIELD = "compression_config"  # of early versions of compressed-tensors
_MODELOPT_FILE = "hf_quant_config.json"
_FP8_BLOCK = "weight_block_size"
_EVERY_LINEAR = "Linear"
# Fields that quantize, sparsify or rotate something else, and so change what a weight means.
_REFUSED_FIELDS = ("kv_cache_scheme", "transform_config", "sparsity_config", "moe_sparsity_config")
# Format, type and bits of compressed-tensors: how safetensors store it.
_STORED = {
    ("float-quantized", "float", 8): "F8_E4M3",
    ("naive-quantized", "float", 8): "F8_E4M3",
    ("int-quantized", "int", 8): "I8",
    ("naive-quantized", "int", 8): "I8",
    ("pack-quantized", "int", 4): "I32",
    ("pack-quantized", "int", 8): "I32",
}


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How a checkpoint stores a linear layer's weight.

    How it is held and multiplied is another matter: `layers/weights.py` decides that.

    Attributes:
        stored: the dtype's name in safetensors: F8_E4M3; I8; I32 for integers packed into words.
        bits: of one number.
        block: the outputs and inputs that share a scale; None where there is one scale per tensor
            or per output, as the shape of the stored scale says.
        has_zero_point: whether a zero point is stored beside each scale.
    """

    stored: str
    bits: int
    block: tuple[int, int] | None
    has_zero_point: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which layers of a checkpoint are quantized, and how.

    Attributes:
        method: `quant_method` of config.json.
        rules: a target and the format of the layers that match it; the first match counts.
        ignored: patterns of layers that are not quantized.

    A pattern is the name of a layer, or of a module above it, or the end of its name, or "re:" and
    a regular expression for the beginning of its name. The target "Linear" matches every layer.
    """

    method: str
    rules: tuple[tuple[str, StoredFormat], ...]
    ignored: tuple[str, ...]

    def format_of(self, layer: str) -> StoredFormat | None:
        """The format that the config gives a layer; None if it is not quantized."""
        if any(_matches(pattern, layer) for pattern in self.ignored):
            return None
        for target, stored_format in self.rules:
            if target == _EVERY_LINEAR or _matches(target, layer):
                return stored_format
        return None


def read_quantization(hf: dict[str, Any]) -> Quantization | None:
    """The quantization that config.json describes, None if there is none.

    Raises:
        ValueError: the method, or something that the config asks for, is not supported.
    """
    given = {name: hf[name] for name in (_FIELD, _OLDER_FIELD) if hf.get(name)}
    if not given:
        return None
    if len(given) > 1 and given[_FIELD] != given[_OLDER_FIELD]:
        raise ValueError(f"{_FIELD} and {_OLDER_FIELD} differ")
    ((name, config), *_) = given.items()
    if not isinstance(config, dict):
        raise ValueError(f"{name} must be an object, got {excerpt(config)}")
    method = config.get("quant_method")
    if method not in ("fp8", "compressed-tensors"):
        raise ValueError(
            f"{name}: weights quantized by {excerpt(method)} are not supported; "
            "there is fp8, compressed-tensors"
        )
    for field in _REFUSED_FIELDS:
        if _is_asked_for(config.get(field)):
            raise ValueError(f"{method}: {field} is not supported, it is {excerpt(config[field])}")
    return _fp8(config) if method == "fp8" else _compressed_tensors(config)


def refuse_modelopt(folder: Path) -> None:
    """
    Raises:
        CheckpointError: there is the file in which NVIDIA's ModelOpt describes a quantization.
    """
    path = folder / _MODELOPT_FILE
    if path.exists():
        quantized = read_json(path, MAX_CONFIG_BYTES).get("quantization")
        raise CheckpointError(
            f"{path}: weights quantized by modelopt are not supported, "
            f"they are {excerpt(quantized)}"
        )


def _is_asked_for(value: Any) -> bool:
    is_dense = isinstance(value, dict) and value.get("format") == "dense"
    return bool(value) and not is_dense


def _fp8(config: dict[str, Any]) -> Quantization:
    for field, known in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if config.get(field, known) != known:
            raise ValueError(f"fp8: {field} must be {excerpt(known)}, got {excerpt(config[field])}")
    block = config.get(_FP8_BLOCK)
    stored_format = StoredFormat("F8_E4M3", 8, None if block is None else _block(_FP8_BLOCK, block))
    ignored = _patterns(config, "modules_to_not_convert") or _patterns(config, "ignored_layers")
    return Quantization("fp8", ((_EVERY_LINEAR, stored_format),), ignored)


def _compressed_tensors(config: dict[str, Any]) -> Quantization:
    rules = list(_rules(config))
    rules.sort(key=lambda rule: (rule[0] == _EVERY_LINEAR, rule[0].startswith("re:")))
    return Quantization("compressed-tensors", tuple(rules), _patterns(config, "ignore"))


def _rules(config: dict[str, Any]) -> Iterator[tuple[str, StoredFormat]]:
    groups = config["config_groups"]
    if not isinstance(groups, dict):
        raise ValueError(
            f"compressed-tensors: config_groups must be an object, got {excerpt(groups)}"
        )
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise ValueError(f"compressed-tensors: the preset {excerpt(name)} is not supported")
        weights = group.get("weights")
        if weights:
            if not isinstance(weights, dict):
                raise ValueError(
                    f"compressed-tensors: weights of {excerpt(name)} must be an object, "
                    f"got {excerpt(weights)}"
                )
            storage = group.get("format") or config.get("format")
            stored_format = _group_format(storage, weights)
            if "targets" not in group:
                raise ValueError(
                    f"compressed-tensors: the field targets of {excerpt(name)} is missing"
                )
            for target in _patterns(group, "targets"):
                yield target, stored_format


def _group_format(storage: Any, weights: dict[str, Any]) -> StoredFormat:
    kind = weights.get("type", "int")
    bits = weights.get("num_bits", 8)
    is_symmetric = weights.get("symmetric", True)
    # Compared, and not looked up: what a file says may have no hash.
    stored = next((name for key, name in _STORED.items() if key == (storage, kind, bits)), None)
    if stored is None:
        known = ", ".join(f"{name} {kind}{bits}" for name, kind, bits in _STORED)
        raise ValueError(
            f"compressed-tensors: the format {excerpt(storage)} of {kind}{bits} weights is not"
            f" supported; there is {known}"
        )
    if weights.get("actorder") in ("group", "dynamic", True):
        raise ValueError("compressed-tensors: weights ordered by activations are not supported")
    strategy = weights.get("strategy") or _implied_strategy(weights.get("group_size"))
    has_packed_tensor_zero = stored == "I32" and strategy == "tensor"
    if not is_symmetric and (kind == "float" or has_packed_tensor_zero):
        raise ValueError(
            f"compressed-tensors: {kind}{bits} weights with a zero point are not supported"
            f" with the strategy {excerpt(strategy)}"
        )
    return StoredFormat(stored, bits, _strategy_block(strategy, weights), not is_symmetric)


def _implied_strategy(group_size: Any) -> str:
    if group_size is None:
        return "tensor"
    if type(group_size) is not int:
        raise ValueError(
            f"compressed-tensors: group_size must be an integer, got {excerpt(group_size)}"
        )
    return "group" if group_size > 0 else "channel"


def _strategy_block(strategy: str, weights: dict[str, Any]) -> tuple[int, int] | None:
    if strategy in ("tensor", "channel"):
        return None
    if strategy == "group":
        return _block("group_size", [1, weights["group_size"]])
    if strategy == "block":
        return _block("block_structure", weights["block_structure"])
    raise ValueError(
        f"compressed-tensors: the strategy {excerpt(strategy)} is not supported; there is tensor,"
        " channel, group, block"
    )


def _block(field: str, size: Any) -> tuple[int, int]:
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(
            f"{field}: a scale block must be two positive integers, got {excerpt(size)}"
        )
    return size[0], size[1]


def _patterns(config: dict[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field)
    patterns = [] if value is None else value
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(
            f"{field} must be a list of texts, the names of layers, got {excerpt(value)}"
        )
    for pattern in patterns:
        if pattern.startswith("re:"):
            _check_expression(pattern.removeprefix("re:"))
    return tuple(patterns)


def _check_expression(expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"{excerpt(expression)} is no regular expression: {error}") from None


def _matches(pattern: str, layer: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return layer == pattern or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}")
