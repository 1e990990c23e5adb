"""Root-mean-square norms with their weight; the formula stands in `kernel/norm.py`."""

# Dimension key: T tokens in the batch, D width of the normalised dimension.

from __future__ import annotations

from torch import Tensor

from minisgl.kernel import add_rms_norm, rms_norm
from minisgl.layers.base import BaseOP, WeightSource


class _Norm(BaseOP):
    def __init__(self, width: int, eps: float) -> None:
        self.eps = eps
        self._width = width

    def load(self, source: WeightSource, name: str = "") -> None:
        self.weight_D = source.read(f"{name}.weight", (self._width,))


class RMSNorm(_Norm):
    """Norm of rows."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight_D, self.eps)


class RMSNormFused(_Norm):
    """Residual add, then norm."""

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Args:
            residual_TD: overwritten with the sum.

        Returns:
            normed_TD, residual_TD: the second is x plus residual, un-normalised, for the next block.
        """
        if residual_TD is None:
            return rms_norm(x_TD, self.weight_D, self.eps), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps), residual_TD
