"""A tensor of which each rank has a part; the whole is their sum."""

# Dimensions: D model width, T tokens of a step.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.distributed.communicator import DistributedCommunicator


@dataclass(frozen=True, slots=True)
class PartialSum:
    """What a row-parallel layer returns: whoever reads it adds up the parts of the ranks.

    A norm that reads it can do both at once. All ranks read it, in one way and in one order, and
    each reads it once, since the part is overwritten.
    """

    part_TD: Tensor
    comm: DistributedCommunicator

    def add_up(self) -> Tensor:
        """x_TD, equal on all ranks."""
        return self.comm.all_reduce(self.part_TD)

    def add_up_and_norm(
        self, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `kernel.residual_norm` of the sum."""
        return self.comm.add_up_and_norm(self.part_TD, residual_TD, weight_D, eps)


def whole(x_TD: Tensor | PartialSum) -> Tensor:
    """The tensor, or the sum."""
    return x_TD.add_up() if isinstance(x_TD, PartialSum) else x_TD
