"""Weights of layers: how they are read, merged, held and multiplied.

A layer knows which outputs and inputs fall to its rank, its bias and its collectives. A weight
knows its numbers. Every weight is held in the compute dtype today; a `WeightSource` dequantizes
what a checkpoint stores in fewer bits.
"""

# Dimensions: A experts that a token chooses, D model width, E experts, F mlp width,
# I inputs of a linear layer, O outputs of a linear layer, T tokens of a step,
# U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel import (
    CpuLinear,
    gpu_linear,
    gpu_linear_in_parts,
    gpu_linear_silu,
    silu_and_mul,
)
from minisgl.layers.base import WeightSource
from minisgl.moe import BaseMoeBackend

Gated = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerShard:
    """The part of one linear layer of a checkpoint that a rank takes.

    Attributes:
        name: the layer's name in the checkpoint.
        shape: outputs and inputs of the whole layer.
        outputs, inputs: those of this rank; None for all.
    """

    name: str
    shape: tuple[int, int]
    outputs: range | None = None
    inputs: range | None = None


class LinearWeight:
    """The weight of a linear layer on one rank, in the compute dtype."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI
        self._cpu: CpuLinear | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as it is held, without a packed copy."""
        return self._weight_OI.nbytes

    def equals(self, other_OI: Tensor) -> bool:
        """Whether all numbers are those of another weight. It waits for the device."""
        return torch.equal(self._weight_OI, other_OI)

    def choose_kernel(self, *, pack: bool) -> None:
        """Choose how to multiply. `pack` allows a second copy of the weight on a CPU."""
        if self._weight_OI.device.type == "cpu":
            self._cpu = CpuLinear(self._weight_OI, pack=pack)

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """y_TO = x_TI @ weight_OI.T + bias_O."""
        if self._cpu:
            return self._cpu(x_TI, bias_O)
        if x_TI.is_cuda:
            return gpu_linear(x_TI, self._weight_OI, bias_O)
        return F.linear(x_TI, self._weight_OI, bias_O)

    def multiply_in_parts(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor | None:
        """parts_XTO in float32, whose sum is y_TO, or None where the product is not divided."""
        return gpu_linear_in_parts(x_TI, self._weight_OI, bias_O) if x_TI.is_cuda else None

    def multiply_gated(self, x_TI: Tensor, bias_U: Tensor | None, activation: Gated) -> Tensor:
        """activation(gate, up) of the halves of y_TU."""
        if x_TI.is_cuda and bias_U is None and activation is silu_and_mul:
            return gpu_linear_silu(x_TI, self._weight_OI)
        gate_TF, up_TF = self.multiply(x_TI, bias_U).chunk(2, dim=1)
        return activation(gate_TF, up_TF)


def load_linear_weight(source: WeightSource, shards: Iterable[LayerShard]) -> LinearWeight:
    """Read the weight of a linear layer, and choose the class that holds and multiplies it.

    All linear layers call this function but one: a tied output head shares the tensor of the
    embedding (`layers/embedding.py`). A further class is chosen here. Today every weight is held in
    the compute dtype.

    Args:
        shards: of layers with the same inputs; they are merged, output after output.
    """
    weights = [
        source.read(f"{shard.name}.weight", shard.shape, rows=shard.outputs, cols=shard.inputs)
        for shard in shards
    ]
    return LinearWeight(weights[0] if len(weights) == 1 else torch.cat(weights))


class ExpertBank:
    """The weights of a rank's experts of a layer, stacked; each expert is a gated MLP.

    Args:
        gate_up_EUD: the gate's rows over the up projection's.
    """

    def __init__(self, gate_up_EUD: Tensor, down_EDF: Tensor) -> None:
        self._gate_up_EUD = gate_up_EUD
        self._down_EDF = down_EDF

    def multiply(
        self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor, backend: BaseMoeBackend
    ) -> Tensor:
        """Sum over the experts of each token, as `BaseMoeBackend.forward` says."""
        return backend.forward(x_TD, self._gate_up_EUD, self._down_EDF, weight_TA, expert_TA)


def load_expert_bank(
    source: WeightSource,
    name: str,
    experts: range,
    shape: tuple[int, int],
    columns: range,
) -> ExpertBank:
    """Read a rank's experts of a layer.

    As `load_linear_weight`, it chooses the class that holds them. They are read expert by expert
    into the stack, because memory may not hold them twice.

    Args:
        experts: of the layer, those of this rank.
        shape: the whole width of an expert's MLP, and the model width.
        columns: of the width of an expert's MLP, those of this rank.
    """
    mlp_width, width = shape
    for i, expert in enumerate(experts):
        prefix = f"{name}.{expert}"
        gate_FD = source.read(f"{prefix}.gate_proj.weight", shape, rows=columns)
        up_FD = source.read(f"{prefix}.up_proj.weight", shape, rows=columns)
        down_DF = source.read(f"{prefix}.down_proj.weight", (width, mlp_width), cols=columns)
        if i == 0:
            gate_up_EUD = gate_FD.new_empty(len(experts), 2 * len(columns), width)
            down_EDF = down_DF.new_empty(len(experts), width, len(columns))
        torch.cat((gate_FD, up_FD), out=gate_up_EUD[i])
        down_EDF[i] = down_DF
    return ExpertBank(gate_up_EUD, down_EDF)
