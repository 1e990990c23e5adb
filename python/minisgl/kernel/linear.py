"""Products with a linear layer's weight; the best kernel depends on the number of tokens.

On a CPU a compiled kernel (`csrc/cpu_linear.cpp`) reads the weight at the speed of memory, and a
step of it can be captured. In a processor's matrix unit it multiplies any number of tokens.

Without a matrix unit it multiplies up to 128. oneDNN, which multiplies more, takes as long at 128
tokens and longer at fewer; it is faster by up to two times if the weight was packed into its
blocked layout beforehand. The packed copy doubles the memory, so the caller decides whether to make
it. oneDNN keeps code for each number of tokens that it has seen, up to 2.4 MiB for the products of
a layer; tokens are therefore padded to few numbers.
"""

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
# step, U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.activation import silu_and_mul
from minisgl.kernel.dispatch import cpu_kernels_for, cuda_kernels_for, triton_kernels_for
from minisgl.kernel.linear_tiles import LinearTile, linear_tile
from minisgl.kernel.native import load_cpu_kernels

# What the compiled kernel of a CPU takes without a matrix unit; of more tokens oneDNN sees
# multiples of a number. All products of SmolLM2-135M on two cores of an AMD EPYC with
# AVX512-BF16, by kernel and by oneDNN: 24 tokens in 8.6 and 10.6 ms, 64 in 18 and 20, 128 in 32 and
# 33, 256 in 63 and 60.
_MOST_OF_CPU_KERNEL = 128
_TOKENS_OF_ONEDNN = 32
# The smallest size that `sizes_without_padding` names; the compiled kernel takes any.
_FEWEST_TOKENS = 8
# A compiled kernel of a GPU is faster than torch for a few tokens: on an H200, 4 tokens, 5120 to
# 7168 in 20 µs instead of 24, but 7168 to 8192 in 34 instead of 31.
_FEW_TOKENS = 16
_LARGEST_WEIGHT_FOR_FEW = 50_000_000  # numbers
# For few tokens, a small weight has a kernel of its own. A step of 16 requests of Qwen3-0.6B takes
# 1.23 ms with it, and 1.34 with the other, which needs more shared memory.
_SMALL_SIDE = 1024  # outputs or inputs, whichever are fewer
_SMALL_WEIGHT = 1 << 22  # numbers
_SMALL_GATED_WEIGHT = 1 << 23  # of gate and up, whose kernel also has the activation
_PACK_FOR_TOKENS = 32


def gpu_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return y_TO = x_TI @ weight_OI.T + bias_O on a GPU.

    One token has a kernel in Triton, a few tokens have two in CUDA. All are bound by reading the
    weight. Some more tokens are multiplied in small tiles. Torch computes the rest.
    """
    if len(x_TI) == 1:
        y_1O: Tensor = _triton_kernels(x_TI).one_token_linear(x_TI, weight_OI, bias_O)
        return y_1O
    kernels = _few_token_kernels(x_TI, weight_OI)
    if kernels is not None:
        return few_token_linear(kernels, x_TI, weight_OI, bias_O)
    tile = _tile(x_TI, weight_OI)
    if tile is not None:
        y_1TO: Tensor = _triton_kernels(x_TI).tiled_linear(x_TI, weight_OI, bias_O, tile)
        return y_1TO[0]
    return F.linear(x_TI, weight_OI, bias_O)


def gpu_linear_in_parts(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor | None:
    """Return parts_XTO in float32, whose sum is y_TO = x_TI @ weight_OI.T + bias_O, on a GPU.

    The inputs of some tokens are divided where that lets more of the device multiply.

    Returns:
        None where they are not divided: `gpu_linear` is as fast.
    """
    if len(x_TI) == 1 or _small_weight_kernels(x_TI, weight_OI, _SMALL_WEIGHT) is not None:
        return None
    tile = _tile(x_TI, weight_OI, may_divide=True)
    if tile is None or tile.parts == 1:
        return None
    parts_XTO: Tensor = _triton_kernels(x_TI).tiled_linear(x_TI, weight_OI, bias_O, tile)
    return parts_XTO


def gpu_linear_silu(x_TI: Tensor, weight_UI: Tensor) -> Tensor:
    """Return silu(gate) * up of tokens on a GPU, rounded as by `gpu_linear` and `silu_and_mul`.

    For one token, a few and some more the product and the activation are one kernel, and for many
    on Hopper if their tiles fill it.

    Args:
        weight_UI: the rows of the gate, and then those of up.
    """
    if len(x_TI) == 1:
        y_1F: Tensor = _triton_kernels(x_TI).one_token_silu(x_TI, weight_UI)
        return y_1F
    kernels = _small_weight_kernels(x_TI, weight_UI, _SMALL_GATED_WEIGHT)
    if kernels is not None:
        return small_weight_silu(kernels, x_TI, weight_UI)
    tile = _tile(x_TI, weight_UI, halves=2)
    if tile is not None:
        y_TF: Tensor = _triton_kernels(x_TI).tiled_silu(x_TI, weight_UI, tile)
        return y_TF
    kernels = _many_token_kernels(x_TI, weight_UI)
    if kernels is not None:
        return many_token_silu(kernels, x_TI, weight_UI)
    gate_TF, up_TF = gpu_linear(x_TI, weight_UI, None).chunk(2, dim=1)
    return silu_and_mul(gate_TF, up_TF)


def gpu_linear_tile(
    like: Tensor, shape: tuple[int, int, int], *, halves: int, may_divide: bool
) -> LinearTile | None:
    """The small tile that a product takes on a GPU, or None where it takes another kernel.

    Args:
        like: has the device and the dtype.
        shape: tokens, outputs and inputs.
        halves: 2 for gate and up, 1 for any other weight.
        may_divide: whether the inputs may be divided (`gpu_linear_in_parts`).
    """
    kernels = triton_kernels_for(like)
    if kernels is None or like.itemsize != 2:
        return None
    num_tokens, outputs, inputs = shape
    return linear_tile(
        num_tokens,
        outputs // halves,
        inputs,
        halves=halves,
        may_divide=may_divide,
        num_processors=kernels.num_processors(like),
        shared_bytes=kernels.shared_bytes(like),
    )


def _tile(
    x_TI: Tensor, weight_OI: Tensor, *, halves: int = 1, may_divide: bool = False
) -> LinearTile | None:
    """The tile of a product, if small tiles take it, and less time than torch."""
    if x_TI.stride(1) != 1 or not weight_OI.is_contiguous():
        return None
    shape = (len(x_TI), len(weight_OI), x_TI.shape[1])
    return gpu_linear_tile(x_TI, shape, halves=halves, may_divide=may_divide)


def _triton_kernels(x_TI: Tensor) -> Any:
    """The functions of `gpu/`, which take tensors of any GPU."""
    kernels = triton_kernels_for(x_TI)
    assert kernels is not None
    return kernels


def _few_token_kernels(x_TI: Tensor, weight_OI: Tensor) -> Any | None:
    """The kernels, if one for a few tokens takes a product, and less time than torch."""
    if not _are_few(x_TI, weight_OI) or weight_OI.numel() > _LARGEST_WEIGHT_FOR_FEW:
        return None
    kernels = cuda_kernels_for(weight_OI)
    if kernels is None or _is_small(weight_OI, _SMALL_WEIGHT):
        return kernels
    return kernels if x_TI.shape[1] <= kernels.most_inputs_of_few_tokens(weight_OI) else None


def _small_weight_kernels(x_TI: Tensor, weight_OI: Tensor, most_numbers: int) -> Any | None:
    """The kernels, if one for a few tokens and a small weight takes a product."""
    if not _are_few(x_TI, weight_OI) or not _is_small(weight_OI, most_numbers):
        return None
    return cuda_kernels_for(weight_OI)


def _are_few(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether tokens and weight are such that kernels for a few tokens take them."""
    num_tokens, inputs = x_TI.shape
    if not 1 < num_tokens <= _FEW_TOKENS or inputs % 8:
        return False
    return x_TI.is_contiguous() and weight_OI.is_contiguous()


def _is_small(weight_OI: Tensor, most_numbers: int) -> bool:
    """Whether the kernel of small weights takes a weight."""
    return weight_OI.numel() <= most_numbers and min(weight_OI.shape) <= _SMALL_SIDE


def _many_token_kernels(x_TI: Tensor, weight_UI: Tensor) -> Any | None:
    """The kernels, if one for many tokens takes gate and up, and less time than torch."""
    outputs = len(weight_UI) // 2
    if x_TI.shape[1] % 8 or outputs % 8:
        return None
    if not x_TI.is_contiguous() or not weight_UI.is_contiguous():
        return None
    kernels = cuda_kernels_for(weight_UI)
    if kernels is None or not kernels.fills_gated_tiles(x_TI, weight_UI):
        return None
    return kernels


def few_token_linear(
    kernels: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return y_TO = x_TI @ weight_OI.T + bias_O for up to 16 tokens.

    Sums are in float32 and rounded once. What a token gets does not depend on those beside it.

    Args:
        kernels: those of csrc/*.cu.
        x_TI, weight_OI, bias_O: bfloat16; rows of x and the weight begin at multiples of 16 bytes.
    """
    is_small = _is_small(weight_OI, _SMALL_WEIGHT)
    multiply = kernels.small_linear if is_small else kernels.few_token_linear
    y_TO = x_TI.new_empty((len(x_TI), len(weight_OI)))
    multiply(x_TI, weight_OI, weight_OI.new_empty(0) if bias_O is None else bias_O, y_TO)
    return y_TO


def small_weight_silu(kernels: Any, x_TI: Tensor, weight_UI: Tensor) -> Tensor:
    """Return silu(gate) * up for up to 16 tokens and a small weight.

    Gate and up are rounded before the activation.

    Args:
        kernels: those of csrc/*.cu.
        x_TI, weight_UI: as those of `few_token_linear`; the rows of the gate, and then those of up.
    """
    y_TF = x_TI.new_empty((len(x_TI), len(weight_UI) // 2))
    kernels.small_silu(x_TI, weight_UI, y_TF)
    return y_TF


def many_token_silu(kernels: Any, x_TI: Tensor, weight_UI: Tensor) -> Tensor:
    """Return silu(gate) * up for any number of tokens, on Hopper.

    Gate and up are rounded before the activation. What a token gets does not depend on those
    beside it.

    Args:
        kernels: those of csrc/*.cu.
        x_TI, weight_UI: contiguous bfloat16; the rows of the gate, and then those of up. Inputs and
            outputs are multiples of 8.
    """
    y_TF = x_TI.new_empty((len(x_TI), len(weight_UI) // 2))
    kernels.gated_tiles(x_TI, weight_UI, y_TF)
    return y_TF


def _onednn_multiplies_bf16() -> bool:
    """Whether oneDNN is there and knows this processor: without AVX-512 it may not."""
    if not torch.backends.mkldnn.is_available():
        return False
    is_supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_supported


def most_of_cpu_kernel() -> int:
    """Tokens that a compiled kernel of this CPU multiplies at most, with a weight that suits it."""
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

        What a token gets does not depend on those beside it, but on whether they are more than 4
        or 8.
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
    """The same tokens and some more, of any content, so that oneDNN sees few numbers of them."""
    num_tokens = len(x_TI)
    missing = -num_tokens % _TOKENS_OF_ONEDNN
    if missing == 0:
        return x_TI
    padded_TI = x_TI.new_empty((num_tokens + missing, x_TI.shape[1]))
    padded_TI[:num_tokens] = x_TI
    return padded_TI


def sizes_without_padding(num_others: int, most: int) -> list[int]:
    """How many bfloat16 tokens a CPU multiplies beside `num_others` without padding, ascending.

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
