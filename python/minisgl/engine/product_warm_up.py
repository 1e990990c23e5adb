"""Calls the Triton kernels of linear layers that steps will launch; see `kernel_warm_up.py`."""

# Dimensions: D model width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
# step, X a selection out of another dimension: parts of the inputs.

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from minisgl.engine.kernel_sizes import KernelSizes, small_size
from minisgl.kernel import (
    LinearTile,
    add_parts_rms_norm,
    gpu_linear,
    gpu_linear_silu,
    gpu_linear_tile,
    tiled_sizes,
    triton_kernels_for,
)


def call_one_token_products(sizes: KernelSizes) -> None:
    """Multiply one token with weights of each shape, with a bias and without.

    The tile of a program is chosen by the shape. Gate and up projection of an MLP also have their
    activation.
    """
    width = sizes.model.width
    shapes = {*_split_by_outputs(sizes), *_split_by_inputs(sizes)}
    if sizes.mlp_width is not None:
        shapes.add((2 * sizes.mlp_width, width))
    for outputs, inputs in shapes:
        x_1I = sizes.numbers(1, inputs)
        for bias_O in (None, sizes.numbers(outputs)):
            gpu_linear(x_1I, sizes.weight(outputs, inputs), bias_O)
    if sizes.mlp_width is not None:
        gpu_linear_silu(sizes.numbers(1, width), sizes.weight(2 * sizes.mlp_width, width))


@dataclass(frozen=True, slots=True)
class _TiledProduct:
    """A weight of the model, as small tiles take it.

    Attributes:
        shape: outputs and inputs.
        halves: 2 for gate and up with their activation.
        may_divide: whether a norm adds up parts of the inputs.
        may_have_bias: as those of queries, keys and values may, which no config tells.
    """

    shape: tuple[int, int]
    halves: int = 1
    may_divide: bool = False
    may_have_bias: bool = False


def call_tiled_products(sizes: KernelSizes) -> None:
    """Multiply some tokens by each small tile that a weight takes.

    A tile is chosen by the shape, and the product here is a smaller one.
    """
    like = sizes.numbers(1)
    calls = set()
    for product, num_tokens in itertools.product(_products_in_tiles(sizes), tiled_sizes()):
        outputs, inputs = product.shape
        tile = gpu_linear_tile(
            like,
            (num_tokens, outputs, inputs),
            halves=product.halves,
            may_divide=product.may_divide,
        )
        if tile is not None:
            calls |= {
                (tile, product.halves, small_size(outputs), has_bias)
                for has_bias in {False, product.may_have_bias}
            }
    for tile, halves, outputs, has_bias in sorted(calls):
        _multiply_in_tiles(sizes, tile, halves, outputs, has_bias=has_bias)


def _products_in_tiles(sizes: KernelSizes) -> list[_TiledProduct]:
    model = sizes.model
    alone = sizes.info.size == 1
    qkv, *others = _split_by_outputs(sizes)
    output, *down = _split_by_inputs(sizes)
    products = [
        _TiledProduct(qkv, may_have_bias=True),
        *map(_TiledProduct, others),
        _TiledProduct(output, may_divide=alone, may_have_bias=model.attention_bias),
        *(_TiledProduct(each, 1, alone, model.mlp_bias) for each in down),
    ]
    if sizes.mlp_width is not None:
        gate_up = (2 * sizes.mlp_width, model.width)
        products.append(_TiledProduct(gate_up, halves=2))
        if model.mlp_bias:
            products.append(_TiledProduct(gate_up, may_have_bias=True))
    return products


def _multiply_in_tiles(
    sizes: KernelSizes, tile: LinearTile, halves: int, outputs: int, *, has_bias: bool
) -> None:
    kernels: Any = triton_kernels_for(sizes.numbers(1))
    x_1I = sizes.numbers(1, tile.parts * tile.inputs)
    weight_OI = sizes.numbers(halves * outputs, tile.parts * tile.inputs)
    if halves == 2:
        kernels.tiled_silu(x_1I, weight_OI, tile)
        return
    parts_XTO = kernels.tiled_linear(
        x_1I, weight_OI, sizes.numbers(outputs) if has_bias else None, tile
    )
    if tile.parts > 1:
        width = sizes.model.width
        parts_XTD = parts_XTO.new_zeros(tile.parts, 1, width)
        residual_TD = sizes.numbers(1, width)
        add_parts_rms_norm(parts_XTD, residual_TD, sizes.numbers(width), sizes.model.norm_eps)


def _split_by_outputs(sizes: KernelSizes) -> list[tuple[int, int]]:
    """Outputs and inputs of weights whose outputs the ranks divide, but gate and up.

    The first is that of queries, keys and values.
    """
    width = sizes.model.width
    num_all_heads = sizes.num_heads + 2 * sizes.num_kv_heads
    shapes = [(num_all_heads * sizes.model.head_dim, width), (len(sizes.vocab.tokens), width)]
    if sizes.model.num_experts:
        shapes.append((sizes.model.num_experts, width))  # the router, whole on each rank
    return shapes


def _split_by_inputs(sizes: KernelSizes) -> list[tuple[int, int]]:
    """Outputs and inputs of weights whose inputs the ranks divide.

    The first is that of attention's outputs.
    """
    width = sizes.model.width
    shapes = [(width, sizes.num_heads * sizes.model.head_dim)]
    if sizes.mlp_width is not None:
        shapes.append((width, sizes.mlp_width))
    return shapes
