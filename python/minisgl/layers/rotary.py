"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways to stretch it.

default   angle(position, i) = position * theta^(-2i / H)
linear    positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)
llama3    low frequencies divided, high ones kept, a ramp between (Llama 3.1)
yarn      low and high by number of rotations, and attention scaled (Peng et al. 2023,
          arXiv:2309.00071)
divided   each frequency by a number of its own: how GGUF files write down any of the above
"""

# Dimensions: H head width, L positions of a sequence, T tokens of a step.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minisgl.checkpoint import DIVIDED, ROPE_TYPES, RotaryConfig
from minisgl.errors import CheckpointError
from minisgl.kernel import Rotation
from minisgl.layers.base import BaseOP, StateLessOP
from minisgl.utils.excerpts import excerpt

_POSITIONS_AT_A_TIME = 1 << 16  # when a table is made


class RotaryEmbedding(StateLessOP):
    """A table of angles by position; see `Rotation`."""

    def __init__(
        self, inverse_frequency: Tensor, scale: float, num_positions: int, dtype: torch.dtype
    ) -> None:
        half = inverse_frequency.numel()
        self._cos_LH = torch.empty(num_positions, 2 * half, dtype=dtype)
        self._sin_LH = torch.empty(num_positions, 2 * half, dtype=dtype)
        # A long context has tables of gigabytes, and what they are made of is larger.
        for start in range(0, num_positions, _POSITIONS_AT_A_TIME):
            end = min(start + _POSITIONS_AT_A_TIME, num_positions)
            angle = torch.outer(torch.arange(start, end, dtype=torch.float32), inverse_frequency)
            cos = angle.cos() * scale
            sin = angle.sin() * scale
            self._cos_LH[start:end] = torch.cat((cos, cos), dim=-1)
            self._sin_LH[start:end] = torch.cat((-sin, sin), dim=-1)

    def to(self, device: torch.device) -> None:
        self._cos_LH = self._cos_LH.to(device)
        self._sin_LH = self._sin_LH.to(device)

    def forward(self, position_T: Tensor) -> Rotation:
        """The angles of positions, all below the table's length."""
        return Rotation(self._cos_LH, self._sin_LH, position_T)


class RotaryTables:
    """The tables of a model, made on demand: layers with equal rotations share one."""

    def __init__(self, num_positions: int, dtype: torch.dtype) -> None:
        self._num_positions = num_positions
        self._dtype = dtype
        self._tables: dict[RotaryConfig | None, RotaryEmbedding] = {}

    def table(self, config: RotaryConfig | None, head_dim: int) -> RotaryEmbedding:
        """The table of a layer; without a config one of angle 0, for the same kernels.

        Raises:
            CheckpointError: as `get_rope`.
        """
        if config not in self._tables:
            self._tables[config] = self._make(config, head_dim)
        return self._tables[config]

    def _make(self, config: RotaryConfig | None, head_dim: int) -> RotaryEmbedding:
        if config is None:
            return RotaryEmbedding(
                torch.zeros(head_dim // 2), 1.0, self._num_positions, self._dtype
            )
        return get_rope(config, self._num_positions, self._dtype)


def get_rope(config: RotaryConfig, num_positions: int, dtype: torch.dtype) -> RotaryEmbedding:
    """Make the table for positions below num_positions, on the CPU.

    It is computed in float32 and rounded once.

    Raises:
        CheckpointError: an unknown kind, or one of its parameters is missing or wrong.
    """
    if config.kind not in _KINDS:
        raise CheckpointError(
            f"config.json: rope_type {excerpt(config.kind)} is not supported; "
            f"there is {', '.join(ROPE_TYPES)}"
        )
    given = {name: value for name, value in config.scaling.items() if value is not None}
    try:
        inverse_frequency, scale = _KINDS[config.kind](replace(config, scaling=given))
    except KeyError as missing:
        raise CheckpointError(
            f"config.json: rope_type {config.kind!r} needs the field {missing}"
        ) from None
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json: rope_type {config.kind!r} cannot have the parameters {excerpt(given)}: "
            f"{error}"
        ) from None
    return RotaryEmbedding(inverse_frequency, scale, num_positions, dtype)


def set_rope_device(model: BaseOP, device: torch.device) -> None:
    """Move the tables of all rotary embeddings of a model."""
    for op in model.walk():
        if isinstance(op, RotaryEmbedding):
            op.to(device)


def _default(config: RotaryConfig) -> tuple[Tensor, float]:
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / (config.theta**exponent), 1.0


def _linear(config: RotaryConfig) -> tuple[Tensor, float]:
    return _default(config)[0] / config.scaling["factor"], 1.0


def _llama3(config: RotaryConfig) -> tuple[Tensor, float]:
    frequency, _ = _default(config)
    scaling = config.scaling
    rotations = config.original_context * frequency / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequency * keep + frequency / scaling["factor"] * (1 - keep), 1.0


def _yarn(config: RotaryConfig) -> tuple[Tensor, float]:
    frequency, _ = _default(config)
    scaling = config.scaling
    half = config.head_dim // 2
    original = config.original_context
    factor = scaling["factor"]

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that rotates this often over the original context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return config.head_dim * turns / (2 * math.log(config.theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, config.head_dim - 1)
    width = high - low  # below 0 where the bounds come in the other order
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (width or 0.001)
    interpolate = ramp.clamp(0, 1)
    stretched = frequency / factor * interpolate + frequency * (1 - interpolate)
    return stretched, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: dict[str, Any], factor: float) -> float:
    """What cos and sin are multiplied with: the "attention factor"."""

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


def _divided(config: RotaryConfig) -> tuple[Tensor, float]:
    frequency, _ = _default(config)
    return frequency / torch.tensor(config.scaling["divisors"], dtype=torch.float32), 1.0


_KINDS: dict[str, Callable[[RotaryConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    DIVIDED: _divided,
}
