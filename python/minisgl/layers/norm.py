"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467).

normed = x / sqrt(mean(x^2) + eps) * weight. Statistics in float32, output in x's dtype.
"""

# Dimension key: T tokens in the batch, D width of the normalised dimension.

from __future__ import annotations

from torch import Tensor

from minisgl.kernel import rms_norm
from minisgl.layers.base import BaseOP, WeightSource


class _Norm(BaseOP):
    def __init__(self, width: int, eps: float) -> None:
        self._width = width
        self._eps = eps

    def load(self, source: WeightSource, name: str = "") -> None:
        self._weight_D = source.read(f"{name}.weight", (self._width,))

    def _normalize(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self._weight_D, self._eps)


class RMSNorm(_Norm):
    """Norm over the last dimension, of any leading shape."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return self._normalize(x_TD)


class RMSNormFused(_Norm):
    """Residual add, then norm."""

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Args:
            x_TD: overwritten with the sum.

        Returns:
            normed_TD, residual_TD: the second is x plus residual, un-normalised, for the next block.
        """
        residual_TD = x_TD if residual_TD is None else x_TD.add_(residual_TD)
        return self._normalize(residual_TD), residual_TD
