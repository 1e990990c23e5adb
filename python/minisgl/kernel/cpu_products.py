"""Products with a linear layer's weight on a CPU; the best kernel depends on the number of tokens.

A compiled kernel (`csrc/cpu_linear.cpp`) reads the weight at the speed of memory, and a step of it
can be captured. In a processor's matrix unit it multiplies any number of tokens.

Without a matrix unit it multiplies up to 128. oneDNN, which multiplies more, takes as long at 128
tokens and longer at fewer; it is faster by up to two times if the weight was packed into its
blocked layout beforehand. The packed copy doubles the memory, so the caller decides whether to make
it. oneDNN keeps code for each number of tokens that it has seen, up to 2.4 MiB for the products of
a layer; tokens are therefore padded to few numbers.
"""

# Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.dispatch import cpu_kernels_for
from minisgl.kernel.native import load_cpu_kernels

# What the compiled kernel takes without a matrix unit; of more tokens oneDNN sees multiples of a
# number. All products of SmolLM2-135M on two cores of an AMD EPYC with AVX512-BF16, by kernel and
# by oneDNN: 24 tokens in 8.6 and 10.6 ms, 64 in 18 and 20, 128 in 32 and 33, 256 in 63 and 60.
_MOST_OF_CPU_KERNEL = 128
_TOKENS_OF_ONEDNN = 32
_PACK_FOR_TOKENS = 32
# The smallest size that `sizes_without_padding` names; the compiled kernel takes any.
_FEWEST_TOKENS = 8


def _onednn_multiplies_bf16() -> bool:
    """Whether oneDNN is there and knows this processor: without AVX-512 it may not."""
    if not torch.backends.mkldnn.is_available():
        return False
    is_supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_supported


def most_of_cpu_kernel() -> int:
    """The most tokens that a compiled kernel of this CPU multiplies, with a suitable weight."""
    kernels = load_cpu_kernels()
    if kernels is None:
        return 0
    return sys.maxsize if kernels.has_matrix_unit() else _MOST_OF_CPU_KERNEL


class CpuLinear:
    """y_TO = x_TI @ weight_OI.T + bias_O on a CPU, for a weight that does not change afterwards.

    Args:
        pack: whether to keep a packed copy of a bfloat16 weight too, if oneDNN multiplies with it.
    """

    def __init__(self, weight_OI: Tensor, *, pack: bool) -> None:
        self._weight_OI = weight_OI
        self._num_outputs = weight_OI.shape[0]
        self._no_bias_O = weight_OI.new_empty(0)
        self._packed: Tensor | None = None
        self._kernels: Any | None = None
        self._most_of_kernel = 0  # tokens
        if weight_OI.dtype != torch.bfloat16:
            return
        self._kernels = cpu_kernels_for(weight_OI)
        if self._kernels is not None:
            in_unit = self._kernels.matrix_unit_takes(weight_OI)
            self._most_of_kernel = sys.maxsize if in_unit else _MOST_OF_CPU_KERNEL
        if weight_OI.numel() == 0:  # oneDNN takes none
            return
        if pack and self._most_of_kernel < sys.maxsize and _onednn_multiplies_bf16():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACK_FOR_TOKENS)

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        assert x_TI.dtype == self._weight_OI.dtype
        num_tokens = x_TI.shape[0]
        if 1 <= num_tokens <= self._most_of_kernel:
            return self._by_kernel(self._kernels, x_TI, bias_O)
        if num_tokens == 1 and x_TI.dtype == torch.bfloat16:
            return self._one_token(x_TI, bias_O)
        if num_tokens > _MOST_OF_CPU_KERNEL and x_TI.dtype == torch.bfloat16:
            return self._by_onednn(_padded(x_TI), bias_O)[:num_tokens]
        return self._by_onednn(x_TI, bias_O)

    def _by_onednn(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        if len(x_TI) == 0 or self._packed is None:
            return F.linear(x_TI, self._weight_OI, bias_O)
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TI, self._packed, bias_O, "none", [], ""
        )
        return y_TO

    def _by_kernel(self, kernels: Any, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Sum in float32, round once.

        A token's result does not depend on the other tokens, but on whether there are more than 12
        in all (8 without AVX-512, 4 with a matrix unit).
        """
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        if bias_O is None:
            bias_O = self._no_bias_O
        y_TO = x_TI.new_empty((x_TI.shape[0], self._num_outputs))
        kernels.linear(x_TI, self._weight_OI, bias_O, y_TO)
        return y_TO

    def _one_token(self, x_1I: Tensor, bias_O: Tensor | None) -> Tensor:
        """Compute with torch's own kernel: meanwhile oneDNN is off for the whole process."""
        was_enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return F.linear(x_1I, self._weight_OI, bias_O)
        finally:
            torch._C._set_mkldnn_enabled(was_enabled)


def _padded(x_TI: Tensor) -> Tensor:
    """The same tokens and padding of any content, so that oneDNN sees few different sizes."""
    num_tokens = len(x_TI)
    missing = -num_tokens % _TOKENS_OF_ONEDNN
    if missing == 0:
        return x_TI
    padded_TI = x_TI.new_empty((num_tokens + missing, x_TI.shape[1]))
    padded_TI[:num_tokens] = x_TI
    return padded_TI


def sizes_without_padding(num_others: int, most: int) -> list[int]:
    """The numbers of tokens, ascending, that need no padding beside `num_others` in bfloat16.

    A matrix unit multiplies any number; for it these sizes are as good as others.

    Args:
        most: the sizes are not larger than this.
    """
    in_kernel = range(_FEWEST_TOKENS, _MOST_OF_CPU_KERNEL - num_others + 1, _FEWEST_TOKENS)
    first = -num_others % _TOKENS_OF_ONEDNN
    in_onednn = range(first, most + 1, _TOKENS_OF_ONEDNN)
    largest = in_kernel[-1] if in_kernel else _FEWEST_TOKENS - 1
    sizes = [*in_kernel, *(size for size in in_onednn if size > largest)]
    return [size for size in sizes if size <= most]
