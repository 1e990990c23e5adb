"""Calls the Triton kernels of linear layers that steps will launch; see `kernel_warm_up.py`."""

# Dimensions: I inputs of a linear layer, O outputs of a linear layer, U both halves of a gated mlp.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.engine.kernel_sizes import KernelSizes, small_size
from minisgl.kernel import (
    LinearTile,
    RowTile,
    can_have_cuda_kernels,
    gpu_linear,
    gpu_linear_silu,
    gpu_linear_tile,
    gpu_row_tile,
    sizes_in_rows,
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
        sizes: numbers of tokens that take them.
        may_divide: whether a norm adds up parts of the inputs.
        may_have_bias: as those of queries, keys and values may, which no config tells.
    """

    shape: tuple[int, int]
    sizes: list[int]
    may_divide: bool = False
    may_have_bias: bool = False

    def tiles(self, sizes: KernelSizes) -> set[LinearTile]:
        found = (_tile(sizes, each, self.shape, 1, self.may_divide) for each in self.sizes)
        return {tile for tile in found if tile is not None}

    def tiles_of_rows(self, sizes: KernelSizes) -> set[RowTile]:
        """They have no kernel of Triton, but a norm adds up their parts."""
        found = (_row_tile(sizes, each, self.shape, 1, self.may_divide) for each in self.sizes)
        return {tile for tile in found if tile is not None}


def call_tiled_products(sizes: KernelSizes) -> None:
    """Multiply some tokens by each small tile that a weight takes, but gate and up.

    A tile is chosen by the shape, and the product here is a smaller one.
    """
    kernels: Any = triton_kernels_for(sizes.numbers(1))
    calls = {
        (tile, small_size(product.shape[0]), has_bias)
        for product in _products_in_tiles(sizes)
        for tile in product.tiles(sizes)
        for has_bias in {False, product.may_have_bias}
    }
    for tile, outputs, has_bias in sorted(calls):
        x_1I = sizes.numbers(1, tile.parts * tile.inputs)
        weight_OI = sizes.numbers(outputs, tile.parts * tile.inputs)
        kernels.tiled_linear(x_1I, weight_OI, sizes.numbers(outputs) if has_bias else None, tile)


def call_tiled_silu(sizes: KernelSizes) -> None:
    """Multiply some tokens with gate and up by each small tile that these take."""
    kernels: Any = triton_kernels_for(sizes.numbers(1))
    for tile in sorted(set(_gated_tiles(sizes).values())):
        x_1I = sizes.numbers(1, tile.inputs)
        weight_UI = sizes.numbers(2 * small_size(sizes.mlp_width or 1), tile.inputs)
        kernels.tiled_silu(x_1I, weight_UI, tile)


def numbers_of_parts(sizes: KernelSizes) -> list[int]:
    """Into how many parts inputs are divided that a norm adds up."""
    products = _products_in_tiles(sizes)
    small = {tile.parts for product in products for tile in product.tiles(sizes)}
    of_rows = {tile.parts for product in products for tile in product.tiles_of_rows(sizes)}
    return sorted((small | of_rows) - {1})


def _products_in_tiles(sizes: KernelSizes) -> list[_TiledProduct]:
    model = sizes.model
    alone = sizes.info.size == 1
    every = _sizes()
    qkv, *others = _split_by_outputs(sizes)
    output, *down = _split_by_inputs(sizes)
    products = [
        _TiledProduct(qkv, every, may_have_bias=True),
        *(_TiledProduct(each, every) for each in others),
        _TiledProduct(output, every, may_divide=alone, may_have_bias=model.attention_bias),
        *(_TiledProduct(each, every, alone, model.mlp_bias) for each in down),
    ]
    if sizes.mlp_width is not None:
        with_activation = {*_gated_tiles(sizes), *_sizes_of_gated_rows(sizes)}
        without = [size for size in every if size not in with_activation]
        products.append(_TiledProduct(_gate_up(sizes), without, may_have_bias=model.mlp_bias))
    return products


def _sizes() -> list[int]:
    """Numbers of tokens such that each choice of a product's kernel is made at one of them."""
    return sorted({*tiled_sizes(), *sizes_in_rows()})


def _gated_tiles(sizes: KernelSizes) -> dict[int, LinearTile]:
    """The tile of gate and up with their activation, for the numbers of tokens that have one."""
    if not _has_silu(sizes):
        return {}
    gate_up = _gate_up(sizes)
    found = {size: _tile(sizes, size, gate_up, 2, may_divide=False) for size in _sizes()}
    return {size: tile for size, tile in found.items() if tile is not None}


def _sizes_of_gated_rows(sizes: KernelSizes) -> list[int]:
    """Numbers of tokens whose gate and up, with their activation, have tiles of rows."""
    if not _has_silu(sizes):
        return []
    gate_up = _gate_up(sizes)
    tiles = {size: _row_tile(sizes, size, gate_up, 2, may_divide=False) for size in _sizes()}
    return [size for size, tile in tiles.items() if tile is not None]


def _has_silu(sizes: KernelSizes) -> bool:
    """Whether there are gate and up whose activation may be in the kernel of their product."""
    model = sizes.model
    return sizes.mlp_width is not None and not model.mlp_bias and model.activation == "silu"


def _gate_up(sizes: KernelSizes) -> tuple[int, int]:
    """Outputs and inputs of gate and up."""
    assert sizes.mlp_width is not None
    return 2 * sizes.mlp_width, sizes.model.width


def _tile(
    sizes: KernelSizes, num_tokens: int, shape: tuple[int, int], halves: int, may_divide: bool
) -> LinearTile | None:
    if _row_tile(sizes, num_tokens, shape, halves, may_divide) is not None:
        return None
    outputs, inputs = shape
    return gpu_linear_tile(
        sizes.numbers(1), (num_tokens, outputs, inputs), halves=halves, may_divide=may_divide
    )


def _row_tile(
    sizes: KernelSizes, num_tokens: int, shape: tuple[int, int], halves: int, may_divide: bool
) -> RowTile | None:
    like = sizes.numbers(1)
    if not can_have_cuda_kernels(like):
        return None
    outputs, inputs = shape
    return gpu_row_tile(like, (num_tokens, outputs, inputs), halves=halves, may_divide=may_divide)


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
