"""Matrix products with weights on a CPU, where the best way depends on the number of tokens.

For one token the product is bound by reading the weight: torch's own bf16 kernel reads it at the speed of
memory, oneDNN at a third of that. For more tokens oneDNN wins, by up to two times if the weight was packed into
its blocked layout beforehand; the packed copy doubles the memory, so the caller says whether to make it.
"""

# Dimension key: T tokens in the batch, D inputs, F outputs.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import kernels_for

_PACK_FOR_TOKENS = 32


def one_token_linear(x_1D: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """y_1F = x_1D @ weight_FD.T + bias_F on a GPU."""
    kernels = kernels_for(x_1D)
    if kernels is None or not x_1D.is_cuda:
        return F.linear(x_1D, weight_FD, bias_F)
    y_1F: Tensor = kernels.one_token_linear(x_1D, weight_FD, bias_F)
    return y_1F


class CpuLinear:
    """y_TF = x_TD @ weight_FD.T + bias_F for a weight that stays as it is."""

    def __init__(self, weight_FD: Tensor, *, pack: bool) -> None:
        self._weight_FD = weight_FD
        can_pack = (
            pack and weight_FD.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
        )
        self._packed: Tensor | None = (
            torch.ops.mkldnn._reorder_linear_weight(weight_FD, _PACK_FOR_TOKENS)
            if can_pack
            else None
        )

    def __call__(self, x_TD: Tensor, bias_F: Tensor | None) -> Tensor:
        if x_TD.shape[0] == 1 and x_TD.dtype == torch.bfloat16:
            return self._one_token(x_TD, bias_F)
        if self._packed is None or x_TD.shape[0] == 0:
            return F.linear(x_TD, self._weight_FD, bias_F)
        y_TF: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TD, self._packed, bias_F, "none", [], ""
        )
        return y_TF

    def _one_token(self, x_TD: Tensor, bias_F: Tensor | None) -> Tensor:
        was_enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return F.linear(x_TD, self._weight_FD, bias_F)
        finally:
            torch._C._set_mkldnn_enabled(was_enabled)
