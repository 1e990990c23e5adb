"""A tensor in parts, which its reader adds up."""

# Dimensions: D model width, T tokens of a step, X a selection out of another dimension: parts of
# the inputs.

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.distributed.communicator import DistributedCommunicator
from minisgl.kernel import add_parts_rms_norm, parts_rms_norm, residual_norm, rms_norm


class PartialSum(ABC):
    """The result of a row-parallel layer, in parts that its reader adds up.

    A norm that reads it can add up and norm at once. It is read once, since a part may be
    overwritten.
    """

    @abstractmethod
    def add_up(self) -> Tensor:
        """x_TD, equal on all ranks."""

    @abstractmethod
    def add_up_and_norm(
        self, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `kernel.residual_norm` of the sum."""

    @abstractmethod
    def norm(self, weight_D: Tensor, eps: float) -> Tensor:
        """As `kernel.rms_norm` of the sum."""


@dataclass(frozen=True, slots=True)
class SumOverRanks(PartialSum):
    """Each rank has a part. All ranks read it by the same method, in the same order."""

    part_TD: Tensor
    comm: DistributedCommunicator

    def add_up(self) -> Tensor:
        return self.comm.all_reduce(self.part_TD)

    def add_up_and_norm(
        self, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self.comm.add_up_and_norm(self.part_TD, residual_TD, weight_D, eps)

    def norm(self, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(self.add_up(), weight_D, eps)


@dataclass(frozen=True, slots=True)
class SumOverInputs(PartialSum):
    """A single rank has all parts: the programs of its GPU divided the inputs of a product.

    Attributes:
        parts_XTD: contiguous float32.
        dtype: of the sum.
    """

    parts_XTD: Tensor
    dtype: torch.dtype

    def add_up(self) -> Tensor:
        return self.parts_XTD.sum(dim=0).to(self.dtype)

    def add_up_and_norm(
        self, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual_TD is None:
            return residual_norm(self.add_up(), None, weight_D, eps)
        return add_parts_rms_norm(self.parts_XTD, residual_TD, weight_D, eps), residual_TD

    def norm(self, weight_D: Tensor, eps: float) -> Tensor:
        return parts_rms_norm(self.parts_XTD, weight_D, eps, self.dtype)


def whole(x_TD: Tensor | PartialSum) -> Tensor:
    """The tensor, or the sum."""
    return x_TD.add_up() if isinstance(x_TD, PartialSum) else x_TD
