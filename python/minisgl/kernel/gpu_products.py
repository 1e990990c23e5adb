"""Products with a linear layer's weight on a GPU; the best kernel depends on the number of tokens.

tokens                             kernel
1                                  `gpu/linear.py`, bound by reading the weight
2 to 16, a small weight            `csrc/small_linear.cu`
2 to 16, undivided inputs          `csrc/linear.cu`
2 to 64, a large weight            `csrc/row_tiles.cu` on Hopper, in the tiles of `row_tiles.py`
65 to 192, some large weights      the same
2 to 64; 128, 256 of some weights  `gpu/tiled_products.py`, in the tiles of `linear_tiles.py`
many, of gate and up on Hopper     `csrc/gated_tiles.cu`, with the activation
all else                           torch
"""

# Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
# step, U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.activation import silu_and_mul
from minisgl.kernel.dispatch import cuda_kernels_for, triton_kernels_for
from minisgl.kernel.linear_tiles import MOST_TILED_TOKENS, LinearTile, linear_tile
from minisgl.kernel.row_tiles import RowTile, row_tile

# A compiled kernel of a GPU is faster than torch for a few tokens: on an H200, 4 tokens, 5120 to
# 7168 in 20 µs instead of 24, but 7168 to 8192 in 34 instead of 31.
_FEW_TOKENS = 16
_LARGEST_WEIGHT_FOR_FEW = 50_000_000  # numbers
# For few tokens, a small weight has a kernel of its own. A step of 16 requests of Qwen3-0.6B takes
# 1.23 ms with it, and 1.34 with the other, which needs more shared memory.
_SMALL_SIDE = 1024  # outputs or inputs, whichever are fewer
_SMALL_WEIGHT = 1 << 22  # numbers
_SMALL_GATED_WEIGHT = 1 << 23  # of gate and up, whose kernel also has the activation


def gpu_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return y_TO = x_TI @ weight_OI.T + bias_O on a GPU.

    One token has a kernel in Triton, a few tokens have two in CUDA, and on Hopper some tokens with
    a large weight have one. All are bound by reading the weight. Some more tokens are multiplied in
    small tiles. Torch computes the rest.
    """
    if len(x_TI) == 1:
        y_1O: Tensor = _triton_kernels(x_TI).one_token_linear(x_TI, weight_OI, bias_O)
        return y_1O
    rows = _row_tile(x_TI, weight_OI)
    if rows is not None:
        return row_tiles(cuda_kernels_for(weight_OI), x_TI, weight_OI, bias_O, rows)[0]
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
    rows = _row_tile(x_TI, weight_OI, may_divide=True)
    if rows is not None:
        if rows.parts == 1:
            return None
        return row_tiles(cuda_kernels_for(weight_OI), x_TI, weight_OI, bias_O, rows)
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
    rows = _row_tile(x_TI, weight_UI, halves=2)
    if rows is not None:
        return row_tiles_silu(cuda_kernels_for(weight_UI), x_TI, weight_UI, rows)
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
    """The small tile of a product on a GPU, or None where another kernel computes it.

    Args:
        like: has the device and the dtype.
        shape: tokens, outputs and inputs.
        halves: 2 for gate and up, 1 for any other weight.
        may_divide: whether the inputs may be divided (`gpu_linear_in_parts`).
    """
    num_tokens, outputs, inputs = shape
    kernels = triton_kernels_for(like)
    if kernels is None or like.itemsize != 2 or not 0 < num_tokens <= MOST_TILED_TOKENS:
        return None
    return linear_tile(
        num_tokens,
        outputs // halves,
        inputs,
        halves=halves,
        may_divide=may_divide,
        num_processors=kernels.num_processors(like),
        shared_bytes=kernels.shared_bytes(like),
    )


def gpu_row_tile(
    like: Tensor, shape: tuple[int, int, int], *, halves: int, may_divide: bool
) -> RowTile | None:
    """The tile of rows of a product on a Hopper GPU, or None where another kernel computes it.

    Where there is no compiler, no product takes it (`can_have_cuda_kernels`).

    Args:
        like, shape, halves, may_divide: as of `gpu_linear_tile`.
    """
    num_tokens, outputs, inputs = shape
    kernels = triton_kernels_for(like)
    if kernels is None or like.dtype != torch.bfloat16 or not kernels.is_hopper(like):
        return None
    return row_tile(
        num_tokens,
        outputs // halves,
        inputs,
        halves=halves,
        may_divide=may_divide,
        num_processors=kernels.num_processors(like),
    )


def _row_tile(
    x_TI: Tensor, weight_OI: Tensor, *, halves: int = 1, may_divide: bool = False
) -> RowTile | None:
    """The tile of rows of a product, if they take it, and less time than other kernels."""
    if not x_TI.is_contiguous() or not weight_OI.is_contiguous():
        return None
    shape = (len(x_TI), len(weight_OI), x_TI.shape[1])
    tile = gpu_row_tile(x_TI, shape, halves=halves, may_divide=may_divide)
    return None if tile is None or cuda_kernels_for(x_TI) is None else tile


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


def row_tiles(
    kernels: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tile: RowTile
) -> Tensor:
    """Return parts_XTO, whose sum is y_TO = x_TI @ weight_OI.T + bias_O.

    Sums are in float32. One part is rounded to bfloat16, several are in float32.

    Args:
        kernels: those of csrc/*.cu.
        x_TI: up to `MOST_TOKENS_OF_ROWS` tokens.
        x_TI, weight_OI, bias_O: bfloat16, contiguous; inputs and outputs are multiples of 8.
    """
    dtype = torch.float32 if tile.parts > 1 else x_TI.dtype
    parts_XTO = x_TI.new_empty((tile.parts, len(x_TI), len(weight_OI)), dtype=dtype)
    bias = weight_OI.new_empty(0) if bias_O is None else bias_O
    kernels.row_tiles(x_TI, weight_OI, bias, parts_XTO, tile.rows)
    return parts_XTO


def row_tiles_silu(kernels: Any, x_TI: Tensor, weight_UI: Tensor, tile: RowTile) -> Tensor:
    """Return silu(gate) * up, as `row_tiles` with one part; gate and up are rounded first."""
    y_TF = x_TI.new_empty((len(x_TI), len(weight_UI) // 2))
    kernels.row_tiles_silu(x_TI, weight_UI, y_TF, tile.rows)
    return y_TF


def few_token_linear(
    kernels: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Return y_TO = x_TI @ weight_OI.T + bias_O for up to 16 tokens.

    Sums are in float32 and rounded once. A token's result does not depend on the other tokens.

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

    Gate and up are rounded before the activation. A token's result does not depend on the other
    tokens.

    Args:
        kernels: those of csrc/*.cu.
        x_TI, weight_UI: contiguous bfloat16; the rows of the gate, and then those of up. Inputs and
            outputs are multiples of 8.
    """
    y_TF = x_TI.new_empty((len(x_TI), len(weight_UI) // 2))
    kernels.gated_tiles(x_TI, weight_UI, y_TF)
    return y_TF
