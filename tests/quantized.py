"""Tiny checkpoints whose linear layers are quantized, each beside the same weights dequantized.

The formats are written here without the code under test. How compressed-tensors packs integers was
compared with its own `pack_to_int32` (version 0.20).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# What a layer stores, by the end of the name, and the weight that this means.
Stored = tuple[dict[str, Tensor], Tensor]
Quantize = Callable[[Tensor], Stored]

BLOCK = (16, 16)
GROUP = 16
FP8_MAX = 448.0


def per_tensor(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def per_channel(weight: Tensor) -> tuple[int, int]:
    return 1, weight.shape[1]


def blocks(weight: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each block, as a grid each."""
    shape = [-(-n // s) for n, s in zip(weight.shape, size, strict=True)]
    least = torch.empty(shape)
    greatest = torch.empty(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            block = weight[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
            least[i, j] = block.min()
            greatest[i, j] = block.max()
    return least, greatest


def spread(grid: Tensor, size: tuple[int, int], weight: Tensor) -> Tensor:
    """Each number of a grid in all places of its block."""
    whole = grid.float().kron(torch.ones(size))
    return whole[: weight.shape[0], : weight.shape[1]]


def to_fp8(
    weight: Tensor, size: tuple[int, int], scale_name: str, dtype: torch.dtype = torch.float32
) -> Stored:
    least, greatest = blocks(weight, size)
    scale = (torch.maximum(-least, greatest) / FP8_MAX).to(dtype)
    numbers = (weight / spread(scale, size, weight)).clamp(-FP8_MAX, FP8_MAX)
    stored = numbers.to(torch.float8_e4m3fn)
    return (
        {"weight": stored, scale_name: scale},
        stored.float() * spread(scale, size, weight),
    )


def to_ints(
    weight: Tensor, size: tuple[int, int], bits: int, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int8 numbers, scales in bfloat16, int8 zero points, and the weight that they mean."""
    least, greatest = blocks(weight, size)
    top = 2 ** (bits - 1) - 1
    if symmetric:
        scale = (torch.maximum(-least, greatest) / top).bfloat16()
        zero = torch.zeros_like(scale, dtype=torch.int8)
    else:
        scale = ((greatest - least) / (2 * top + 1)).bfloat16()
        zero = (-top - 1 - least / scale.float()).round().clamp(-top - 1, top).to(torch.int8)
    spread_scale = spread(scale, size, weight)
    spread_zero = spread(zero, size, weight)
    numbers = (weight / spread_scale + spread_zero).round().clamp(-top - 1, top)
    return numbers.to(torch.int8), scale, zero, (numbers - spread_zero) * spread_scale


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Along the last dimension into int32, shifted to be unsigned, the first in the lowest bits."""
    a_word = 32 // bits
    rows = []
    for row in numbers.tolist():
        words = [0] * -(-len(row) // a_word)
        for i, number in enumerate(row):
            words[i // a_word] |= (number + 2 ** (bits - 1)) << (i % a_word * bits)
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def plain_ints(weight: Tensor, *, symmetric: bool) -> Stored:
    numbers, scale, zero, dequantized = to_ints(weight, per_channel(weight), 8, symmetric=symmetric)
    stored = {"weight": numbers, "weight_scale": scale}
    return (stored if symmetric else {**stored, "weight_zero_point": zero}), dequantized


def packed_ints(weight: Tensor, size: tuple[int, int], bits: int, *, symmetric: bool) -> Stored:
    numbers, scale, zero, dequantized = to_ints(weight, size, bits, symmetric=symmetric)
    stored = {
        "weight_packed": pack(numbers, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(zero.T, bits).T.contiguous()
    return stored, dequantized


def static_fp8(weight: Tensor) -> Stored:
    """One scale without dimensions, and one for activations, as AutoFP8 writes them."""
    stored, dequantized = to_fp8(weight, per_tensor(weight), "weight_scale")
    stored["weight_scale"] = stored["weight_scale"].reshape(())
    stored["input_scale"] = torch.tensor(0.5)
    return stored, dequantized


def fp8_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **fields}


def group(kind: str, bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    """A config group of compressed-tensors, with the fields that its own serializer writes."""
    targets = fields.pop("targets", ["Linear"])
    storage = fields.pop("format", None)
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        **fields,
    }
    activations = {"dynamic": True, "num_bits": 8, "strategy": "token", "type": kind}
    return {
        "format": storage,
        "input_activations": activations,
        "output_activations": None,
        "targets": targets,
        "weights": weights,
    }


def compressed_config(storage: str, *groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "format": storage,
        "global_compression_ratio": None,
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


@dataclass(frozen=True)
class Scheme:
    """`quantization_config` of config.json, and how each linear layer is stored under it."""

    config: dict[str, Any]
    quantize: Callable[[str], Quantize]


def uniform(config: dict[str, Any], quantize: Quantize) -> Scheme:
    return Scheme(config, lambda layer: quantize)


def mixed(layer: str) -> Quantize:
    if layer.endswith("down_proj"):
        return lambda weight: to_fp8(weight, per_channel(weight), "weight_scale")
    return lambda weight: packed_ints(weight, (1, GROUP), 4, symmetric=True)


SCHEMES: dict[str, Scheme] = {
    "fp8 blocks": uniform(
        fp8_config(weight_block_size=list(BLOCK), modules_to_not_convert=["lm_head", "mlp.gate"]),
        lambda weight: to_fp8(weight, BLOCK, "weight_scale_inv"),
    ),
    "fp8 tensor": uniform(
        fp8_config(activation_scheme="static", ignored_layers=["lm_head"]), static_fp8
    ),
    "fp8 channel": uniform(
        fp8_config(), lambda weight: to_fp8(weight, per_channel(weight), "weight_scale")
    ),
    "compressed fp8 tensor": uniform(
        compressed_config("float-quantized", group("float", 8, "tensor")),
        lambda weight: to_fp8(weight, per_tensor(weight), "weight_scale", torch.bfloat16),
    ),
    "compressed fp8 channel": uniform(
        compressed_config("float-quantized", group("float", 8, "channel")),
        lambda weight: to_fp8(weight, per_channel(weight), "weight_scale", torch.bfloat16),
    ),
    "compressed fp8 blocks": uniform(
        compressed_config(
            "float-quantized", group("float", 8, "block", block_structure=list(BLOCK))
        ),
        lambda weight: to_fp8(weight, BLOCK, "weight_scale", torch.bfloat16),
    ),
    "compressed int8 channel": uniform(
        compressed_config("int-quantized", group("int", 8, "channel")),
        lambda weight: plain_ints(weight, symmetric=True),
    ),
    "compressed int8 channel with zero points": uniform(
        compressed_config("int-quantized", group("int", 8, "channel", symmetric=False)),
        lambda weight: plain_ints(weight, symmetric=False),
    ),
    "compressed int4 groups": uniform(
        compressed_config("pack-quantized", group("int", 4, "group", group_size=GROUP)),
        lambda weight: packed_ints(weight, (1, GROUP), 4, symmetric=True),
    ),
    "compressed int4 groups with zero points": uniform(
        compressed_config(
            "pack-quantized", group("int", 4, "group", group_size=GROUP, symmetric=False)
        ),
        lambda weight: packed_ints(weight, (1, GROUP), 4, symmetric=False),
    ),
    "compressed int4 channel with zero points": uniform(
        compressed_config("pack-quantized", group("int", 4, "channel", symmetric=False)),
        lambda weight: packed_ints(weight, per_channel(weight), 4, symmetric=False),
    ),
    "compressed packed int8 groups": uniform(
        compressed_config("pack-quantized", group("int", 8, "group", group_size=GROUP)),
        lambda weight: packed_ints(weight, (1, GROUP), 8, symmetric=True),
    ),
    "compressed mixed": Scheme(
        compressed_config(
            "mixed-precision",
            group("int", 4, "group", group_size=GROUP, format="pack-quantized"),
            group(
                "float",
                8,
                "channel",
                format="float-quantized",
                targets=[r"re:.*down_proj$"],
            ),
        ),
        mixed,
    ),
}


def quantize_checkpoint(folder: Path, scheme: Scheme, target: Path) -> tuple[Path, Path]:
    """A copy with quantized projections, and one with the weights that these mean."""
    quantized = Path(shutil.copytree(folder, target / "quantized"))
    dequantized = Path(shutil.copytree(folder, target / "dequantized"))
    for file in folder.glob("*.safetensors"):
        stored: dict[str, Tensor] = {}
        meant: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            layer = name.removesuffix(".weight")
            if layer.endswith("_proj"):
                parts, meant[name] = scheme.quantize(layer)(weight)
                stored |= {f"{layer}.{end}": part for end, part in parts.items()}
            else:
                stored[name] = weight
                meant[name] = weight
        save_file(stored, quantized / file.name)
        save_file(meant, dequantized / file.name)
    write_config(quantized, scheme.config)
    return quantized, dequantized


def write_config(folder: Path, quantization: dict[str, Any] | None) -> None:
    """Make config.json say how the weights are quantized."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))
